"""Random numbers that are the same on every mesh and in every layout.

``generator.py`` agrees on a key for each draw; ``philox.py`` fills tensors with the numbers of a
key, in the core or as ``philox_reference.py`` does in plain torch.
"""
