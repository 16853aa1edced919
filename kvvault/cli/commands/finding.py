"""prompts find: whether a text persists, by the names that an engine would give its blocks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.formats import Cell, iso_time, short_ids
from kvvault.cli.run import Run
from kvvault.errors import NamespaceError, StorageError, UsageError

if TYPE_CHECKING:
    from kvvault.integrations.vllm.hashing import Adapter
    from kvvault.model import Namespace
    from kvvault.promptfacts import Chain
    from kvvault.vault import Vault

__all__ = [
    "SUBJECT_FILE",
    "Found",
    "TextQuestion",
    "find_text",
    "prompts_find",
    "question_of",
    "refusals_noted",
    "subject_of",
]

_ASK_NOBODY: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Unless the environment says otherwise: who asks about a text must not tell others of which model,
nor wait for them where they cannot be reached."""

_MAX_TEXT: Final = 64 << 20
_MAX_SALT: Final = 64 << 10
_MAX_SUBJECT: Final = 4 << 10
_PARTIAL: Final = 3


SUBJECT_FILE = Annotated[
    str | None,
    typer.Option(
        "--subject-file",
        metavar="FILE",
        help="The same, from a file that holds the name alone; - for stdin. What stands on the "
        "command line is in the machine's list of processes.",
    ),
]


@dataclass(frozen=True, slots=True)
class TextQuestion:
    """What is looked for."""

    tokens: Sequence[int]
    tenant: str
    model: str
    adapter: Adapter | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """What one namespace has of a text."""

    namespace: Namespace
    chain: Chain | None
    """None: it cannot be asked."""
    of_blocks: int
    why: str = ""
    """It cannot be asked."""


@contextmanager
def refusals_noted(vault: Vault, command: str) -> Iterator[None]:
    """That there is no such prompt, or no such tenant, is an answer, too: it is written down like
    any other before it is given."""
    try:
        yield
    except UsageError:
        vault.note_question(command, rows=0)
        raise


def prompts_find(
    run: Run,
    text_file: Annotated[
        str, typer.Option("--text-file", metavar="FILE", help="The text; - for stdin.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose prompt it was.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="The model's directory, or its name (--tokenizer)."
        ),
    ],
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="A chat: a JSON list of messages, a request's JSON body, or what a user says.",
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="DIR", help="Where the tokenizer is, if not where the model is."
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="FILE", help="As the server's, if it was given one."
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option("--lora", metavar="NAME=PATH", help="Adapter, as the server was told of it."),
    ] = None,
    salt_file: Annotated[
        str | None,
        typer.Option(
            "--salt-file",
            metavar="FILE",
            help="The request's cache_salt, without the line end after it.",
        ),
    ] = None,
) -> int | None:
    """Find out whether a text persists: how much of it, since when, until when, in which prompts.

    Takes vLLM's own code (installed, no GPU and no running engine needed) to make tokens of the
    text and names of the tokens. A text that shares only its beginning with a prompt is found up to
    where they part. All namespaces of the model are asked, also those that no engine uses any more.
    """
    question = question_of(
        text_file,
        tenant,
        model,
        chat=chat,
        tokenizer=tokenizer,
        chat_template=chat_template,
        lora=lora,
        salt_file=salt_file,
    )
    with run.open_vault() as vault:
        found = find_text(vault, question)
    if question.salt is None and not any(one.chain and one.chain.blocks for one in found):
        run.output.note(
            "looked for without a salt; what was sent with a cache_salt takes --salt-file"
        )
    return _show(run, len(question.tokens), found)


def question_of(
    text_file: str,
    tenant: str,
    model: str,
    *,
    chat: bool = False,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    lora: str | None = None,
    salt_file: str | None = None,
) -> TextQuestion:
    """What to look for: the tokens of a text, as a server would make them.

    Raises:
        UsageError: the text, the adapter or the model cannot be used.
        StorageError: a file cannot be read.
    """
    for name, value in _ASK_NOBODY.items():
        os.environ.setdefault(name, value)
    from kvvault.integrations.vllm.rendering import Renderer

    adapter = _adapter(lora)
    text = _read(text_file, _MAX_TEXT)
    salt = None if salt_file is None else _read(salt_file, _MAX_SALT).removesuffix("\n")
    renderer = Renderer(
        tokenizer or model, chat_template=None if chat_template is None else Path(chat_template)
    )
    tokens = renderer.chat(text) if chat else renderer.completion(text)
    return TextQuestion(tokens, tenant, model, adapter, salt)


def find_text(vault: Vault, question: TextQuestion) -> list[Found]:
    """Ask every namespace of the model, and write down that it was asked.

    Raises:
        UsageError: the vault has no such tenant, or nothing of such a model.
        KeyUnavailableError, WrongKeyError, StorageError, CatalogError.
    """
    from kvvault.integrations.vllm import hashing

    spaces = hashing.of_model([one.namespace for one in vault.namespaces()], question.model)
    with refusals_noted(vault, "prompts find"):
        found = [_ask(vault, space, question) for space in spaces]
    prompts = {facts.prompt_id for one in found if one.chain for facts, _ in one.chain.prompts}
    tenant_id = next((t.tenant_id for t in vault.tenants() if t.name == question.tenant), None)
    vault.note_question("prompts find", tenant_id=tenant_id, rows=len(prompts))
    if not spaces:
        raise UsageError(
            "the vault has nothing of that model", hint="its name is in: kvvault ls namespaces"
        )
    return found


def _ask(vault: Vault, space: Namespace, question: TextQuestion) -> Found:
    from kvvault.integrations.vllm import hashing

    scope = vault.scope(question.tenant, space)
    try:
        how = hashing.Hashing.of(space)
    except NamespaceError as error:
        return Found(space, None, 0, f"{error}; {error.hint}")
    links = hashing.chain(question.tokens, how, adapter=question.adapter, salt=question.salt)
    # A block is named by all before it, so one that lives says so much, whatever is gone before it.
    lives = vault.prompts.persist(scope.keys, space, [link.key for link in links])
    left = [link for link, here in zip(links, lives, strict=True) if here]
    chain = vault.prompts.find_chain(
        scope.keys, space, [link.key for link in left], [link.end for link in left]
    )
    return Found(space, chain, len(links))


def _show(run: Run, tokens: int, found: Sequence[Found]) -> int | None:
    for one in found:
        if one.chain is None:
            run.output.warning(f"namespace {one.namespace.digest.hex()[:8]}: {one.why}")
    code = _PARTIAL if any(one.chain is None for one in found) else None
    if run.output.json:
        run.output.document(
            {
                "tokens": tokens,
                "found": any(one.chain is not None and one.chain.blocks for one in found),
                "namespaces": [_json(one) for one in found],
            }
        )
        return code
    having = [(one, one.chain) for one in found if one.chain is not None and one.chain.blocks]
    if not having:
        run.output.lines(
            "nothing of this text persists" + (" where it was looked for" * bool(code))
        )
        return code
    run.output.table(
        ["NAMESPACE", "TOKENS", "OF", "BLOCKS", "OF", "SINCE", "UNTIL"],
        [
            [
                Cell(one.namespace.digest.hex()[:8]),
                Cell(str(chain.tokens), right=True),
                Cell(str(tokens), right=True),
                Cell(str(chain.blocks), right=True),
                Cell(str(one.of_blocks), right=True),
                Cell(_moment(chain.since)),
                Cell(_moment(chain.until)),
            ]
            for one, chain in having
        ],
    )
    short = short_ids(facts.prompt_id for _, chain in having for facts, _ in chain.prompts)
    run.output.table(
        ["PROMPT", "NAMESPACE", "SUBJECT", "REQUEST", "TOKENS IN COMMON"],
        [
            [
                Cell(short[facts.prompt_id]),
                Cell(one.namespace.digest.hex()[:8]),
                Cell(facts.subject or "-"),
                Cell(facts.request_id or "-"),
                Cell(str(common), right=True),
            ]
            for one, chain in having
            for facts, common in chain.prompts
        ],
    )
    return code


def _json(one: Found) -> dict[str, object]:
    chain = one.chain
    if chain is None:
        return {"namespace": one.namespace.digest.hex(), "asked": False, "why": one.why}
    return {
        "namespace": one.namespace.digest.hex(),
        "asked": True,
        "blocks": chain.blocks,
        "of_blocks": one.of_blocks,
        "tokens": chain.tokens,
        "since": iso_time(chain.since),
        "until": iso_time(chain.until),
        "prompts": [
            {
                "id": facts.prompt_id.hex(),
                "subject": facts.subject,
                "request": facts.request_id,
                "tokens_in_common": common,
            }
            for facts, common in chain.prompts
        ],
    }


def _moment(seconds: float | None) -> str:
    stamp = iso_time(seconds)
    return "-" if stamp is None else f"{stamp[:19]}Z"


def subject_of(subject: str | None, subject_file: str | None, *others: str | None) -> str | None:
    """Who is meant by ``--subject`` or ``--subject-file``; None when by neither. `others`: what
    else is read from files.

    Raises:
        UsageError: both are given; stdin is to be read twice; what is in the file is no name.
        StorageError: the file cannot be read.
    """
    from kvvault.scope import check_name

    if subject_file is None:
        return subject
    if subject is not None:
        raise UsageError(
            "--subject and --subject-file name two subjects", hint="give one of the two"
        )
    if (subject_file, *others).count("-") > 1:
        raise UsageError("stdin is read once", hint="write all but one of them to a file")
    name = _read(subject_file, _MAX_SUBJECT).removesuffix("\n")
    check_name(name, "subject")
    return name


def _adapter(lora: str | None) -> Adapter | None:
    from kvvault.integrations.vllm.hashing import Adapter

    if lora is None:
        return None
    name, equals, path = lora.partition("=")
    if not (name and equals and path):
        raise UsageError(
            "--lora: that is not NAME=PATH",
            hint="both are part of a block's name: give them as in the server's --lora-modules",
        )
    return Adapter(name, path)


def _read(name: str, most: int) -> str:
    """A text, byte for byte: a line end that was not sent makes another text.

    :raises UsageError: it is too long, or not UTF-8.
    :raises StorageError: it cannot be read.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(most + 1)
    except OSError as error:
        raise StorageError(
            f"cannot read {name}: {(error.strerror or 'the system refuses').lower()}",
            hint="check the path, and who may read it",
        ) from None
    if len(data) > most:
        raise UsageError(f"{name} is too long", hint=f"at most {most >> 10} KiB are read")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not UTF-8", hint="convert it: what is sent is UTF-8") from None
