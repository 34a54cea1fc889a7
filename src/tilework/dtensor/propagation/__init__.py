"""Sharding propagation: from layouts of inputs to how a call runs.

``strategy.py`` chooses the layouts that move the fewest bytes. ``propagator.py`` combines the
strategy and the operator's rule into the sharding that a mesh caches (``op_sharding.py``).
``register_rule.py`` is for users' rules.
"""
