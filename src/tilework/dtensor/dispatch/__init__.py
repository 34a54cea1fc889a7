"""Calls of torch's functions on DTensors.

``call.py`` runs an operator: the key, the fast path, and the way that the sharding says
(``ways.py``), to the results. ``foreach.py`` has operators on lists, and ``tensor_attributes.py``
functions that are no operators.
"""
