"""Segments: append-only files of encrypted blocks, and the index that finds a block in them."""
