"""The command line: presentation only; what it shows and does is in the modules it calls.

stdout is data, stderr is progress, warnings and errors. Start-up imports neither the catalog's
libraries nor torch or vLLM: each command imports what it needs when it runs.
"""

from __future__ import annotations

from kvvault.cli.app import app, main

__all__ = ["app", "main"]
