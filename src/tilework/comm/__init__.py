"""Process groups: their contract, the World that holds them, and the operations on them."""
