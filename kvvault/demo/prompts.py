"""The prompts of the demo: long, repeatable, and made of this project's own documentation."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["TENANTS", "Conversation", "conversations", "project_text"]

TENANTS: Final = ("alice-gmbh", "bob-clinic")
"""Names that a search can recognise: the catalog must not contain them."""

_SHARED_CHARACTERS: Final = 3000
_PRIVATE_CHARACTERS: Final = 9000
_MATTERS: Final = ("first matter", "second matter")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt, and as whom it is sent."""

    tenant: str
    salt: str
    """vLLM's cache salt: without the same salt, equal prompts do not share a cache."""
    title: str
    prompt: str


def project_text() -> str:
    """All docstrings of the installed package, in a fixed order: about 100,000 characters of
    English. They are where the package is, so nothing has to be downloaded or shipped besides."""
    package = Path(__file__).resolve().parent.parent
    texts = (
        ast.get_docstring(node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return "\n\n".join(filter(None, texts))


def conversations(text: str, tenants: Sequence[str] = TENANTS) -> list[Conversation]:
    """Two conversations for each tenant, in the order in which they are sent.

    All begin with the same system part; what follows differs in every one. `text` is cut up for
    them, and starts again from its beginning when it is short.

    Raises:
        ValueError: `text` is empty.
    """
    if not text:
        raise ValueError("prompts need a text")
    needed = _SHARED_CHARACTERS + len(tenants) * len(_MATTERS) * _PRIVATE_CHARACTERS
    while len(text) < needed:
        text += text
    system = "You answer from the handbook below, and from nothing else.\n\n"
    system += text[:_SHARED_CHARACTERS]
    result: list[Conversation] = []
    for tenant in tenants:
        for matter in _MATTERS:
            start = _SHARED_CHARACTERS + len(result) * _PRIVATE_CHARACTERS
            private = text[start : start + _PRIVATE_CHARACTERS]
            prompt = (
                f"{system}\n\nConfidential file of {tenant}, {matter}:\n\n{private}\n\n"
                "What does the file say, in one sentence?\n"
            )
            result.append(Conversation(tenant, f"salt of {tenant}", matter, prompt))
    return result
