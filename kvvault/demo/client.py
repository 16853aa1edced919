"""A client for vLLM's OpenAI server: streamed completions with everything the demo compares."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvvault.demo.prompts import Conversation
from kvvault.errors import KvvaultError

__all__ = ["Answer", "Client"]

_TIMEOUT_S: Final = 180.0
"""For one answer. Prefilling a few thousand tokens takes seconds, on a machine that does something
else besides perhaps half a minute."""
_SHORT_S: Final = 30.0
"""For a question that costs nothing; the server may be busy all the same."""
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a completion said, and what it cost."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the chosen tokens, natural logarithm, as the server prints them."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was not computed, as the server reports it."""
    first_token_s: float
    """From sending the request to its first token."""

    def same_words(self, other: Answer) -> bool:
        """Whether text and tokens are equal."""
        return self.text == other.text and self.token_ids == other.token_ids

    def logprob_difference(self, other: Answer) -> float:
        """Largest absolute difference between the log probabilities of equal positions; infinite
        when there are not equally many."""
        if len(self.logprobs) != len(other.logprobs):
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


class _Part(BaseModel):
    """The fields of a server-sent event that are of interest; there are others."""

    model_config = ConfigDict(extra="ignore")


class _Version(_Part):
    version: str


class _Count(_Part):
    count: int


class _Logprobs(_Part):
    token_logprobs: list[float | None] = []


class _Choice(_Part):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Details(_Part):
    cached_tokens: int | None = None


class _Usage(_Part):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(_Part):
    choices: list[_Choice] = Field(default_factory=list)
    usage: _Usage | None = None


_P = TypeVar("_P", bound=_Part)


class Client:
    """Talks to a server on this machine, one connection per request. Any thread."""

    def __init__(self, host: str, port: int, model: str) -> None:
        """`model`: the name under which the server serves it."""
        self._host = host
        self._port = port
        self._model = model

    def healthy(self) -> bool:
        """Whether the server accepts requests."""
        try:
            with self._connection(_SHORT_S) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def server_version(self) -> str:
        """The version of vLLM that answers.

        Raises:
            KvvaultError: it does not say.
        """
        return _read(_Version, self._ask("GET", "/version")).version

    def count_tokens(self, prompt: str) -> int:
        """How many tokens a prompt has.

        Raises:
            KvvaultError: the server does not say.
        """
        body = {"model": self._model, "prompt": prompt}
        return _read(_Count, self._ask("POST", "/tokenize", body)).count

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """A short question and its whole answer."""
        try:
            with self._connection(_SHORT_S) as connection:
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, path, data, _JSON)
                response = connection.getresponse()
                answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _failed(f"the connection to the server broke ({path})") from error
        if response.status != 200:
            raise _failed(f"the server refused {path} (HTTP {response.status})")
        return answer

    def _connection(self, limit_s: float) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(
            http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        )

    def complete(self, conversation: Conversation, *, max_tokens: int) -> Answer:
        """Send a prompt, greedily decoded, and collect the stream.

        Raises:
            KvvaultError: the server refused, broke off, or said something else than it should.
                The message holds nothing of the prompt or the answer.
        """
        body = {
            "model": self._model,
            "prompt": conversation.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": conversation.salt,
            "kv_transfer_params": {"kvvault": {"tenant": conversation.tenant}},
        }
        started = time.perf_counter()
        try:
            with self._connection(_TIMEOUT_S) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body).encode(), _JSON)
                response = connection.getresponse()
                if response.status != 200:
                    raise _failed(f"the server refused a prompt (HTTP {response.status})")
                return _collect(_events(response), started)
        except (OSError, http.client.HTTPException) as error:
            raise _failed("the connection to the server broke") from error


def _failed(what: str) -> KvvaultError:
    return KvvaultError(what, hint="look into the server's log (--keep leaves it)")


def _read(form: type[_P], data: bytes) -> _P:
    """What the server said, in the form that it must have.

    Raises:
        KvvaultError: it has not. (The reason may quote the answer, so it is not passed on.)
    """
    try:
        return form.model_validate_json(data)
    except ValidationError as error:
        raise _failed(f"an answer had {error.error_count()} unexpected fields") from None


def _events(response: http.client.HTTPResponse) -> Iterator[_Event]:
    """Server-sent events, until the one that says it was the last."""
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield _read(_Event, data)
    raise _failed("an answer broke off")


def _collect(events: Iterator[_Event], started: float) -> Answer:
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    first: float | None = None
    usage: _Usage | None = None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            if first is None:
                first = time.perf_counter() - started
            text.append(choice.text)
            token_ids += choice.token_ids or []
            if choice.logprobs is not None:
                logprobs += [p for p in choice.logprobs.token_logprobs if p is not None]
    if first is None or usage is None or not token_ids or len(logprobs) != len(token_ids):
        raise _failed("an answer was not complete")
    details = usage.prompt_tokens_details
    return Answer(
        text="".join(text),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        first_token_s=first,
    )
