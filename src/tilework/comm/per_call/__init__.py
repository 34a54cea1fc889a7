"""What belongs to each call: its checks, its record, its place in the program, its callbacks."""
