"""Names that the other packages of tilework use, besides the public names."""

from tilework.mesh.device_mesh import check_device_is_there, find_or_make, mesh_or_current
from tilework.mesh.grid import meshes_of_rank
