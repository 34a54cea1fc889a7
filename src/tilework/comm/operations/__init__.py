"""The operations on groups: collectives, messages, and what is built of them."""
