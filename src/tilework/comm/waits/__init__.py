"""Waits for other ranks: lines on stderr, cycles, and errors that end waits."""
