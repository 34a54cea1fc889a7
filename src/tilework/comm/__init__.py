"""Process groups: the contract, the World that holds groups, and the operations on groups."""
