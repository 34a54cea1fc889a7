"""Names that the other packages of tilework use, besides the public names."""

from tilework.sharded.metadata import Items
from tilework.sharded.optim import local_tensors
