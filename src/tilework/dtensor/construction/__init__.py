"""New DTensors.

``creation.py`` makes them from nothing (zeros, rand, …), ``distribute.py`` from full tensors;
``from_local.py`` finds the layout of the tensor that the ranks' local tensors are shards of.
"""
