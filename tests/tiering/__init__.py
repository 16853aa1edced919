"""Tests of the transfer pool and the tiering engine."""
