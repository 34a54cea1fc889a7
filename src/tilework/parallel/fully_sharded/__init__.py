"""Fully sharded data parallelism.

``fully_shard`` decides when to gather and free, ``flat_group`` has the collectives, ``shards`` is
one parameter, ``policies`` are settings.
"""
