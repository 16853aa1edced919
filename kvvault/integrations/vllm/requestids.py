"""How clients and vLLM name a request. Imports nothing of vLLM.

A client sees the ``id`` of a response, and may have set an ``X-Request-Id`` header, which is part
of that id. The engine's own name of a request is longer. vLLM 0.32 makes them so (entrypoints/
openai/*/serving.py, v1/engine/input_processor.py, v1/engine/parallel_sampling.py); X is the
header's value, or random:

====================  ===============  ==========================  ==========================
endpoint              id of response   engine's name, n = 1        n > 1, sample 2
====================  ===============  ==========================  ==========================
/v1/completions       cmpl-X           cmpl-X-0-RRRRRRRR           2_cmpl-X-0-RRRRRRRR
/v1/chat/completions  chatcmpl-X       chatcmpl-X-RRRRRRRR         2_chatcmpl-X-RRRRRRRR
/v1/responses         resp_X           resp_X_0-RRRRRRRR
====================  ===============  ==========================  ==========================

The number before R in completions counts the prompts of one request (its prompts have one id); in
responses, turns. R is eight random hexadecimal digits, missing when
VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set for the engine. How a request is found by the header's
value alone: `kvvault.naming.request_names`.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_ID", "client_id"]

MAX_ID: Final = 256
"""Characters of a request's id that are kept; a longer one is none."""

_ENGINES: Final = re.compile(
    r"(?:[0-9]{1,6}_(?=cmpl-|chatcmpl-|generate-tokens-))?"
    r"(?P<id>(?P<completion>cmpl-)?(?P<response>resp_)?.*?)"
    r"(?(completion)-[0-9]{1,6})(?(response)_[0-9]{1,6})"
    r"-[0-9a-f]{8}",
    re.DOTALL,
)


def client_id(engines: str, *, randomised: bool = True) -> str | None:
    """The id of the response, from the engine's name of the request; None if there is none that is
    worth keeping (too long, not printable).

    Args:
        engines: `ReqContext.req_id`.
        randomised: whether the engine adds R; see above.
    """
    if len(engines) > MAX_ID + 32:
        return None
    found = _ENGINES.fullmatch(engines if randomised else f"{engines}-00000000")
    name = found["id"] if found else engines
    return name if 0 < len(name) <= MAX_ID and name.isprintable() else None
