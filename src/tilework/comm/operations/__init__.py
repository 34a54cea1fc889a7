"""The operations on groups: collectives, messages, and operations built from them."""
