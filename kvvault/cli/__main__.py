"""``python -m kvvault.cli``."""

from kvvault.cli import main

main()
