"""Fully sharded data parallelism.

``fully_shard`` is the function, ``module`` has the methods that modules get. ``unit`` decides when
the parameters of a call are gathered and freed. ``taking_over`` takes the modules' parameters into
the buffers of ``flat``, which also has the collectives. ``gather_nodes`` puts gathered
parameters into autograd's graph, ``sharded_param`` describes a parameter, and ``policies`` has the
settings.
"""
