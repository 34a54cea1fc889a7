"""Ranks in a grid with named axes, over which tensors are laid out.

    from tilework.mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh["tp"].get_group()

Names are torch.distributed.device_mesh's. *Axis* is a mesh's, *dim* a tensor's; only torch's own
names (``mesh_dim``, ``mesh_dim_names``) say otherwise.
"""

from tilework.mesh.device_mesh import DeviceMesh, current_mesh, init_device_mesh
from tilework.mesh.spec import MeshSpec

__all__ = ["DeviceMesh", "MeshSpec", "current_mesh", "init_device_mesh"]
