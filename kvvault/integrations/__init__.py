"""Adapters for inference engines: the only code that imports them."""
