"""Sharding propagation: from layouts of inputs to how a call runs.

``strategy.py`` chooses the layouts that move the fewest bytes. ``propagator.py`` combines the
strategy and the operator's rule into the sharding that a mesh caches. ``plain_inputs.py`` hashes
plain tensors, and ``pytree.py`` walks arguments and results. ``placed_call.py`` is for rules that
know layouts, and ``register_rule.py`` for users' rules.
"""
