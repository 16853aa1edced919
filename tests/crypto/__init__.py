"""Tests of the primitives, the key hierarchy and the key providers."""
