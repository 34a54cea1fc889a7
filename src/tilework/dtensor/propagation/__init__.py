"""Sharding propagation: how the tensors of an operator have to be laid out, and its results."""
