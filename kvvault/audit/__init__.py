"""The audit log: what was done, in an order nobody can change unnoticed, and receipts of it."""
