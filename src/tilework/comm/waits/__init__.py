"""What happens while a rank waits for others: lines on stderr, cycles, errors of groups."""
