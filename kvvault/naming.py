"""By what names are found again: keyed ids of subjects and requests (HMAC under the tenant's key).

One name can be written in several ways: "é" is one character or two, and a client and a command
line need not agree. What is the same text to Unicode has the same id; what is kept and shown is the
text as it came.
"""

from __future__ import annotations

import unicodedata

from kvvault.crypto.keys import TenantKeys
from kvvault.errors import UsageError

SUBJECT = "subject"
LABELS = "labels"

REQUEST_PREFIXES = (
    "cmpl-",
    "chatcmpl-",
    "generate-tokens-",
    "transcribe-",
    "translate-",
    "decision-",
    "generative-scoring-",
)
"""What vLLM puts before the value of a request's ``X-Request-Id`` header, or before a random one,
to make the id of the response."""


def composed(text: str) -> str:
    """The one way of writing it that is compared: Unicode's NFC."""
    return unicodedata.normalize("NFC", text)


def clean(text: str) -> str:
    """What can be encoded: a client's JSON may hold half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def subject_key(tenant: TenantKeys, subject: str) -> bytes:
    """By what a subject is found again.

    Raises:
        UsageError: it has bytes that are no text (a command line may), so nobody is called so. Does
            not repeat it.
        ClosedError: the tenant was forgotten.
    """
    try:
        name = composed(subject).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "that subject is no text in UTF-8", hint="write it as it was given to the engine"
        ) from None
    return tenant.keyed_id(SUBJECT, name)


def request_names(given: str) -> tuple[str, ...]:
    """Under which ids a request may be kept that somebody calls `given`: the id of its response, or
    the value of its ``X-Request-Id`` header."""
    return given, *(prefix + given for prefix in REQUEST_PREFIXES)


def request_key(tenant: TenantKeys, request_id: str) -> bytes:
    """By what a request is found again.

    Raises:
        ClosedError: the tenant was forgotten.
    """
    return tenant.keyed_id("request", composed(clean(request_id)).encode())
