"""DTensors from nothing, from whole tensors, and from the ranks' parts."""
