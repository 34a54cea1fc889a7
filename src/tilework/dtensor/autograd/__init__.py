"""Gradients of DTensors: the graph is that of their local tensors.

- ``local_graph.py`` finds a tensor's local tensor in the graph.
- ``partial_grads.py`` reduces partial gradients within the graph, and those of parameters together,
  at the end of the backward pass.
- ``gradients.py`` has DTensor's methods and ``torch.autograd.grad``.
"""
