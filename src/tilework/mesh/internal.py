"""Names that the other packages of tilework use, besides the public names."""

from tilework.mesh.device_mesh import find_or_make
from tilework.mesh.devices import check_device_is_there
from tilework.mesh.making import mesh_or_current
