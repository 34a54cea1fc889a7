"""Fully sharded data parallelism.

``fully_shard`` is the function, ``module`` has the methods that modules get. ``unit`` decides when
the parameters of a call are gathered and freed, ``taking_over`` takes over what modules hold,
``flat`` has the buffers and collectives, ``graph`` the place in autograd's graph, ``sharded_param``
is a parameter, and ``policies`` are settings.
"""
