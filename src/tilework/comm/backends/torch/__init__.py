"""torch's own engines as backends."""
