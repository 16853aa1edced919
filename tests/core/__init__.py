"""The core: vault, segments, catalog, recovery."""
