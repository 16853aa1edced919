"""The catalog: one SQLite database that knows every block, and whose key destroys it."""
