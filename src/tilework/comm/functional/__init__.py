"""Functional collectives: new tensors instead of overwritten ones, differentiable and traceable.

- :mod:`.api`: the public functions;
- :mod:`.kinds`: the collectives: for each the start, the result's shape and the adjoint;
- :mod:`.reductions`: reductions as text, for schemas;
- :mod:`.running`: calls, run now or written into a trace;
- :mod:`.ops`: the operators that traces hold;
- :mod:`.async_tensor`: results that wait by themselves.
"""
