"""Calls of torch's functions on DTensors.

``call.py`` runs an operator: the key (``call_key.py``), the fast path, the way that the sharding
says (``ways.py``), and the steps to results (``finishing.py``). ``foreach.py`` has operators on
lists, ``tensor_attributes.py`` functions that are no operators, and ``without_overrides.py`` has
torch's own Python code, run on DTensors.
"""
