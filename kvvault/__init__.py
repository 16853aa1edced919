"""kvvault: an encrypted, catalogued, expiring disk tier for LLM KV caches.

Importing this package costs nothing: it loads neither torch nor vllm, reads no
configuration and opens no file. Start at :mod:`kvvault.vault`.
"""

__version__ = "0.1.0.dev0"
