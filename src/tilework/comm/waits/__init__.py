"""Waits for other ranks: the lines on stderr, the cycles, the errors that end them."""
