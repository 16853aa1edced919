"""Moving blocks between memory and the vault without ever holding up the caller."""
