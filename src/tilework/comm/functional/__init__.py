"""Functional collectives: new tensors instead of overwritten ones, differentiable and traceable.

- :mod:`.api`: the public functions;
- :mod:`.kinds`: what each collective does, its result's shape and its adjoint;
- :mod:`.reductions`: the adjoints of reductions;
- :mod:`.running`: which way a call goes, eager or into a trace;
- :mod:`.ops`: the operators that traces hold;
- :mod:`.waiting`: results that wait by themselves.
"""
