"""The test suite; see the Makefile for the ways to run parts of it."""
