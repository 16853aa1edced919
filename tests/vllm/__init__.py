"""Tests of the vLLM integration."""
