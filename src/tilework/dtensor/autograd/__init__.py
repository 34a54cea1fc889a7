"""Gradients of DTensors: the graph of the local tensors."""
