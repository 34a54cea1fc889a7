"""Sharding propagation: from layouts of inputs to how a call runs.

``strategy.py`` chooses the layouts that move the fewest bytes, and ``propagation.py`` makes of it
and the operator's rule the sharding that a mesh caches. ``plain_inputs.py`` compares plain tensors
between ranks, ``pytree.py`` walks arguments and results. ``placed_call.py`` and
``register_rule.py`` are for rules that know layouts, and for users' rules.
"""
