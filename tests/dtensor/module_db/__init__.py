"""torch's databases of modules and of optimizers, on DTensors against plain tensors.

They are read where torch has them (``torch.testing._internal``), as data.
"""
