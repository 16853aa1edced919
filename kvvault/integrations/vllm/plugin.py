"""Entry point of group `vllm.general_plugins`: makes kvvault's names known to vLLM.

vLLM calls `register` in every process it starts (API server, engine core, workers), some of them
more than once, and does not catch what it raises: an exception here would stop servers that do not
even use kvvault. So it never raises, it imports only vLLM's two small registries, and the modules
behind the names are imported when a configuration asks for them.
"""

from __future__ import annotations

import logging

from kvvault.integrations.vllm import shims

__all__ = ["SPEC_NAME", "TIER_TYPE", "register"]

TIER_TYPE = "kvvault"
"""`{"type": "kvvault", …}` in `secondary_tiers`."""
SPEC_NAME = "KvvaultOffloadingSpec"
"""`"spec_name": "KvvaultOffloadingSpec"` in `kv_connector_extra_config`."""


def register() -> None:
    """Announce the tier and the spec; safe to call any number of times."""
    try:
        shims.register_tier(TIER_TYPE, "kvvault.integrations.vllm.tier", "KvvaultTier")
        shims.register_spec(SPEC_NAME, "kvvault.integrations.vllm.spec", SPEC_NAME)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "kvvault is not available in this vLLM, it needs %d.%d: %s", *shims.TESTED, error
        )
