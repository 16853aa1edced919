"""From a text to the names that an engine gives the blocks of it.

What has to be known about the engine stands among the facts of a namespace: how many tokens a hash,
a block and a chunk have, which groups there are, how hashes are computed and seeded. Which tokens a
text has and what they hash to is vLLM's own code (`rendering`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvvault.errors import NamespaceError
from kvvault.integrations.vllm import rendering
from kvvault.integrations.vllm.rendering import Adapter
from kvvault.model import Namespace

__all__ = ["Adapter", "Hashing", "Link", "chain", "of_model"]

SEED_VARIABLE = "PYTHONHASHSEED"
"""vLLM takes its seed from this variable of the engine's environment, where it is set."""


class Link(NamedTuple):
    """One block of a prompt, by the engine's name of it."""

    key: bytes
    end: int
    """Token of the prompt at which it ends."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group."""

    number: int
    tokens_per_chunk: int
    """Tokens of one stored block."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How the engines of one namespace name blocks."""

    algorithm: str
    seed: str
    tokens_per_hash: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, namespace: Namespace, environment: Mapping[str, str] | None = None) -> Hashing:
        """Read it off a namespace.

        Args:
            environment: where the seed may stand, if the engine was given one; default: this
                process's environment.

        Raises:
            NamespaceError: the namespace is not a vLLM engine's, or its seed is another one.
        """
        facts = dict(namespace.facts)
        if facts.get("engine") != "vllm":
            raise NamespaceError(
                "blocks of this namespace were not named by vLLM",
                hint="only what vLLM stored can be found by its text",
            )
        try:
            per_chunk = int(facts["kv.blocks_per_chunk"])
            groups = tuple(
                Group(int(group["id"]), int(group["tokens_per_block"]) * per_chunk)
                for group in json.loads(facts["kv.groups"])
            )
            tokens_per_hash = int(facts["kv.tokens_per_hash"])
            algorithm, digest = facts["hash.algorithm"], facts["hash.seed"]
        except (KeyError, TypeError, ValueError):
            raise NamespaceError(
                "the namespace does not say how its blocks are named",
                hint="it was written by another version of kvvault; ask with that one",
            ) from None
        return cls(algorithm, _seed(digest, environment), tokens_per_hash, groups)


def _seed(digest: str, environment: Mapping[str, str] | None) -> str:
    """The seed with this digest: vLLM's own, or the one of the environment."""
    given = (os.environ if environment is None else environment).get(SEED_VARIABLE)
    for seed in (given, rendering.default_seed()):
        if seed is not None and hashlib.sha256(seed.encode()).hexdigest() == digest:
            return seed
    raise NamespaceError(
        f"the engine's hashes were seeded with {SEED_VARIABLE}, and its value is not known here",
        hint=f"set {SEED_VARIABLE} to what the engine had, and ask again",
    )


def of_model(namespaces: Iterable[Namespace], model: str) -> list[Namespace]:
    """The namespaces of a model.

    Args:
        model: its directory (the last part of its path counts, so the model may have been
            elsewhere), its name in Hugging Face's form, or what `kvvault ls namespaces` calls it.
    """
    names = {model, Path(model).name}
    if Path(model).is_dir():
        names.add(Path(model).resolve().name)
    return [
        namespace
        for namespace in namespaces
        if namespace.fact("model") in names
        or (namespace.fact("model.weights") or "").startswith(f"hf:{model}@")
    ]


def chain(
    tokens: Sequence[int],
    how: Hashing,
    *,
    adapter: Adapter | None = None,
    salt: str | None = None,
) -> list[Link]:
    """The blocks that a prompt of these tokens has, shortest prefix first; groups in their order.

    As vLLM 0.32's `RequestOffloadState.update_offload_keys` names them
    (distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py): the name of a chunk is the
    hash at its end and the number of its group. Tokens after the last full chunk have no name.
    """
    hashes = rendering.block_hashes(
        tokens,
        algorithm=how.algorithm,
        seed=how.seed,
        tokens_per_hash=how.tokens_per_hash,
        adapter=adapter,
        salt=salt or None,  # vLLM treats an empty salt as none
    )
    links = [
        Link(rendering.offload_key(hashes[end // how.tokens_per_hash - 1], group.number), end)
        for group in how.groups
        for end in range(
            group.tokens_per_chunk,
            len(hashes) * how.tokens_per_hash + 1,
            group.tokens_per_chunk,
        )
    ]
    return sorted(links, key=lambda link: link.end)
