"""New DTensors.

``creation.py`` makes them from nothing (zeros, rand, …), ``distribute.py`` from full tensors.
"""
