"""The checks, records and callbacks of each call, and the place in the program it came from."""
