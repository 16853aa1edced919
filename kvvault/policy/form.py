"""The form of a policy file: its keys and the types of their values, for pydantic.

This is what the JSON schema is made from. What keys mean together is checked in `document`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from kvvault.policy.durations import (
    DURATION_PATTERN,
    SHARE_PATTERN,
    SIZE_PATTERN,
    parse_duration,
    parse_share,
    parse_size,
)
from kvvault.policy.yamltext import Located, Path

__all__ = [
    "MAX_RULES",
    "MatchForm",
    "PolicyForm",
    "RuleForm",
    "VaultForm",
    "schema",
    "validated",
]

MAX_RULES: Final = 256
_NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}$"
_MAX_PATTERNS: Final = 256
_MAX_PATTERN: Final = 256
_MAX_TEXT: Final = 2000

_SIZE_JSON: Final[dict[str, Any]] = {
    "anyOf": [{"type": "string", "pattern": SIZE_PATTERN}, {"type": "integer", "minimum": 1}]
}
_PATTERN_JSON: Final[dict[str, Any]] = {
    "type": "string",
    "minLength": 1,
    "maxLength": _MAX_PATTERN,
}


def _name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(_NAME_PATTERN[1:-1], value):
        return value
    raise ValueError("a name is 1 to 64 of a-z 0-9 . _ - and begins with a letter or digit")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("say something here")
    if len(value) > _MAX_TEXT:
        raise ValueError(f"this is longer than {_MAX_TEXT} characters")
    return " ".join(value.split())


def _patterns(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("an empty list matches nothing; leave the key out to match everything")
    if len(items) > _MAX_PATTERNS:
        raise ValueError(f"these are more than {_MAX_PATTERNS} patterns")
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError('a pattern is text, such as "team-*", or a list of texts')
        if len(item) > _MAX_PATTERN or not item.isprintable():
            raise ValueError(f"a pattern is at most {_MAX_PATTERN} printable characters")
    return tuple(items)


def _true_or_false(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("write true or false")


def _cap(value: object) -> float | int:
    if isinstance(value, str) and value.endswith("%"):
        return parse_share(value)
    return parse_size(value)


def _one_of(*words: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(f"write one of: {', '.join(words)}")

    return check


def _ceiling(value: object) -> float | Literal["never"]:
    return "never" if value == "never" else parse_duration(value)


Name = Annotated[
    str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": _NAME_PATTERN})
]
Text = Annotated[
    str,
    BeforeValidator(_text),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _MAX_TEXT}),
]
Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_patterns),
    WithJsonSchema(
        {
            "anyOf": [
                _PATTERN_JSON,
                {
                    "type": "array",
                    "items": _PATTERN_JSON,
                    "minItems": 1,
                    "maxItems": _MAX_PATTERNS,
                },
            ]
        }
    ),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN}),
]
Ceiling = Annotated[
    float | Literal["never"],
    BeforeValidator(_ceiling),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": DURATION_PATTERN}, {"const": "never"}]}
    ),
]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(_SIZE_JSON)]
Share = Annotated[
    float,
    BeforeValidator(parse_share),
    WithJsonSchema({"type": "string", "pattern": SHARE_PATTERN}),
]
Cap = Annotated[
    float | int,
    BeforeValidator(_cap),
    WithJsonSchema({"anyOf": [*_SIZE_JSON["anyOf"], {"type": "string", "pattern": SHARE_PATTERN}]}),
]
Switch = Annotated[bool, BeforeValidator(_true_or_false), WithJsonSchema({"type": "boolean"})]
RecordWord = Annotated[
    Literal["none", "fingerprint", "preview"],
    BeforeValidator(_one_of("none", "fingerprint", "preview")),
]
Version = Annotated[str, BeforeValidator(_one_of("1")), WithJsonSchema({"const": 1})]


class Form(BaseModel):
    """Unknown keys are refused (REQ-A3): a misspelled ceiling would be no ceiling."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False)


class MatchForm(Form):
    """What a rule applies to. All that stands here must hold; of a list, one must."""

    tenant: Patterns | None = Field(None, description="Patterns of tenant names.")
    model: Patterns | None = Field(
        None, description="Patterns of the model's name; short for the namespace's fact `model`."
    )
    namespace: dict[str, Patterns] = Field(
        default_factory=dict,
        description="Patterns of facts of the namespace, by their names. A fact that is not there "
        "matches no pattern.",
    )
    labels: dict[str, Patterns] = Field(
        default_factory=dict,
        description="Patterns of the request's labels, by their names. A label that is not there "
        "matches no pattern.",
    )


class RuleForm(Form):
    """One rule. The first that matches decides."""

    name: Name = Field(description="What the rule is called in reasons, listings and receipts.")
    match: MatchForm = Field(
        default_factory=lambda: MatchForm.model_validate({}),
        description="What it applies to; left out: everything.",
    )
    retention_class: Name | None = Field(
        None,
        alias="class",
        description="Only for requests that ask for this retention class. They never get more "
        "than they would get without asking.",
    )
    persist: Switch = Field(True, description="false: never written to the vault.")
    delete_by: Ceiling | None = Field(
        None,
        description="Ceiling: so long after it was written a block is gone, whatever else holds. "
        "Needed unless persist is false; `never` says that there is none.",
    )
    idle: Duration | None = Field(
        None, description="Gone when unused for so long; never beyond the ceiling."
    )
    keep_at_least: Duration | None = Field(
        None,
        description="Floor: so long it is not evicted to make room. Never beyond the ceiling.",
    )
    max_bytes: Size | None = Field(
        None, description="Most that one tenant's blocks under this rule may take."
    )
    record: RecordWord | None = Field(
        None,
        description="Which of these is recorded of a prompt besides: none (the default), a keyed "
        "fingerprint, or also a preview encrypted under the tenant's key. Subject, labels, request "
        "id, tokens and times are recorded whatever this says.",
    )
    owner: Text = Field(description="Who answers for this rule.")
    justification: Text = Field(description="Why data is kept so long, or not at all.")


class VaultForm(Form):
    """What holds for the whole vault."""

    cap: Cap = Field(
        0.8,
        json_schema_extra={"default": "80%"},
        description="Most that the vault may take: a size, or a share of its file system.",
    )
    free_floor: Size = Field(
        1 << 30,
        json_schema_extra={"default": "1GiB"},
        description="So much is left free on the file system, whoever else fills it.",
    )
    high_watermark: Share = Field(
        0.95,
        json_schema_extra={"default": "95%"},
        description="At this share of the cap segments begin to be evicted,",
    )
    low_watermark: Share = Field(
        0.9, json_schema_extra={"default": "90%"}, description="and no more at this one."
    )
    purge_every: Duration = Field(
        86400.0,
        json_schema_extra={"default": "24h"},
        description="Within this time what was deleted is beyond recovery, if the key provider "
        "destroys keys.",
    )
    segment: Size | None = Field(
        None, description="At which size a segment is sealed; left out: as kvvault is set."
    )
    window: Duration | None = Field(
        None,
        description="How long a segment takes blocks. They share its deadline, so one dies up to "
        "this much early. Left out: a tenth of the shortest ceiling, at most 5m.",
    )
    clock_jump: Duration = Field(
        604800.0,
        json_schema_extra={"default": "7d"},
        description="A clock that jumps ahead by more is asked about before anything expires by "
        "it.",
    )


class PolicyForm(Form):
    """A retention policy of kvvault; docs/policies.md explains it."""

    kvvault: Version = Field(description="Version of the policy language: 1.")
    name: Name = Field(description="What the policy is called.")
    description: Text = Field(description="What it is for, in a sentence or two.")
    vault: VaultForm = Field(default_factory=lambda: VaultForm.model_validate({}))
    rules: tuple[RuleForm, ...] = Field(min_length=1, max_length=MAX_RULES)


def schema() -> dict[str, Any]:
    """The form as a JSON schema, for editors and other checkers. It knows the keys and the types
    of values; `Policy.parse` also knows what they mean together."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(PolicyForm.model_json_schema(by_alias=True)),
        "title": "kvvault retention policy",
    }


def _plain(part: Any) -> Any:
    """Without what is about Python: titles made from names, and nulls, which no file may have."""
    if isinstance(part, list):
        return [_plain(item) for item in part if item != {"type": "null"}]
    if not isinstance(part, dict):
        return part
    plain = {
        key: _plain(value)
        for key, value in part.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and not value)
    }
    choices = plain.get("anyOf")
    if isinstance(choices, list) and len(choices) == 1:
        del plain["anyOf"]
        plain |= choices[0]
    return plain


# -- reading -------------------------------------------------------------------------------------

_FormT = TypeVar("_FormT", bound=Form)


def validated(form: type[_FormT], located: Located) -> _FormT:
    """A document in its form.

    :raises PolicyError: it is not of that form; says the first thing in the file that is wrong.
    """
    try:
        return form.model_validate(located.value)
    except ValidationError as error:
        _refuse(form, error, located)


def _refuse(form: type[Form], error: ValidationError, located: Located) -> NoReturn:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # An item that is refused makes its list too short, too: the item is what is wrong.
    inner = [
        item
        for item in found
        if not any(
            item["loc"] == other["loc"][: len(item["loc"])]
            for other in found
            if len(other["loc"]) > len(item["loc"])
        )
    ]
    first = min(inner, key=lambda item: located.line(item["loc"]))
    path: Path = first["loc"]
    key = str(path[-1])[:40] if path else ""
    if first["type"] == "extra_forbidden":
        known = _keys(form, path[:-1])
        close = difflib.get_close_matches(key, known, 1)
        located.refuse(
            path,
            f"unknown key {key!r}",
            hint=f"did you mean {close[0]!r}?" if close else f"keys here: {', '.join(known)}",
        )
    if first["type"] == "missing":
        located.refuse(path[:-1], f"{key!r} is missing", hint=_WHY.get(key, _SEE))
    if first["type"] == "too_short":
        located.refuse(path, f"{key!r} is empty", hint="write at least one")
    if first["type"] == "too_long":
        located.refuse(path, f"{key!r} has too many entries", hint=_SEE)
    if first["type"] == "value_error":
        problem, _, hint = first["msg"].removeprefix("Value error, ").partition("; ")
        located.refuse(path, f"{key!r}: {problem}", hint=hint or _SEE)
    # pydantic's own words are about Python.
    located.refuse(path, f"{key!r} is not what belongs here", hint=_SEE)


_SEE: Final = "see docs/policies.md"
_WHY: Final = {
    "owner": "every rule names who answers for it",
    "justification": "every rule says why data is kept so long, or not at all",
    "kvvault": "begin the file with: kvvault: 1",
}


def _keys(form: type[BaseModel], path: Path) -> list[str]:
    """The keys that may stand at a place."""
    for step in path:
        for name, info in form.model_fields.items():
            if step == (info.alias or name):
                inside = [info.annotation, *get_args(info.annotation)]
                form = next(t for t in inside if isinstance(t, type) and issubclass(t, BaseModel))
    return [info.alias or name for name, info in form.model_fields.items()]
