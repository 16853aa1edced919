"""What no figure says: how far a statement reaches, and what it rests on."""

from __future__ import annotations

from typing import Final

from kvvault.crypto.providers.base import Assurance, ProviderInfo

__all__ = [
    "ENGINE",
    "NEVER_PLAINTEXT",
    "STRENGTH",
    "backups",
]

NEVER_PLAINTEXT: Final = (
    "kvvault writes no KV byte to a file in clear. That rests on the way every block takes: it is "
    "encrypted in memory before it is handed to the one module that writes segment files; there is "
    "no unencrypted format and no setting that switches encryption off; a file's bytes are "
    "authenticated whenever they are loaded and, a part every hour, by the scrub job. Names of "
    "tenants, labels and policies are encrypted in the catalog; ids in it are keyed (HMAC). Tests "
    "look for planted plaintext in every file of a vault after success, errors and kills."
)

ENGINE: Final = (
    "Outside kvvault's reach: the memory of the inference engine, its GPU and CPU caches, swap and "
    "core dumps, its logs and event streams. An erased block may still be in the engine's own "
    "caches until these evict it or are reset."
)

STRENGTH: Final = (
    "All data, wrapped keys and texts: AES-256 in GCM mode (NIST SP 800-38D), random 96-bit nonces "
    "drawn from the kernel, 128-bit tags, one random 256-bit secret per segment with a key "
    "commitment; keyed ids: HMAC-SHA-256. 256 bits of key give a security strength of 256 bits in "
    "the sense of NIST SP 800-57. Known answers are checked each time a vault is opened, this "
    "report's included."
)


def backups(info: ProviderInfo) -> str:
    """What a deletion is worth against copies, by what the key provider can claim."""
    common = (
        "kvvault makes no backups of blocks or keys, and a cache needs none. A copy of the vault's "
        "directory that somebody else made before a deletion holds what was deleted as ciphertext. "
    )
    if info.assurance is Assurance.PURGE:
        return common + (
            "After the purge that followed the deletion no key in existence opens it, since the "
            f"root key was destroyed where it was: {info.reason}"
        )
    return common + (
        "It opens for whoever also has a copy of the root key from before the purge, so such "
        f"copies have to be destroyed, or both kept apart: {info.reason}"
    )
