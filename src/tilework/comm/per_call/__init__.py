"""The checks, records and callbacks of each call, and the call's place in the program."""
