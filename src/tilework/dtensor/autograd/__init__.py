"""Gradients of DTensors: the graph is that of their local tensors.

``local_graph.py`` has a tensor's local tensor in the graph; ``partial_grads.py`` the places
where partial gradients are reduced, and ``grad_reduction.py`` those of parameters, reduced together
at the end of the backward pass; ``gradients.py`` what DTensor's methods and ``torch.autograd`` do,
``batched_grads.py`` gradients for each row of a batch, and ``in_place_views.py`` what operators in
place make of a tensor whose dims they change.
"""
