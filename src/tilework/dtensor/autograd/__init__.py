"""Gradients of DTensors: the graph is that of their local tensors.

- ``local_graph.py`` finds a tensor's local tensor in the graph.
- ``partial_grads.py`` reduces partial gradients within the graph; ``grad_reduction.py`` reduces
  the gradients of parameters together, at the end of the backward pass.
- ``gradients.py`` has DTensor's methods and ``torch.autograd.grad``; ``batched_grads.py`` computes
  gradients for each row of a batch.
- ``changed_in_place.py`` links tensors whose shape an operator in place changes (``t_``).
"""
