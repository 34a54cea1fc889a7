"""The axis of a mesh along which a module is parallel, and tensors' layouts along it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilework.dtensor import DTensor
from tilework.dtensor.autograd import partial_grads
from tilework.layout import Placement, Shard
from tilework.mesh import DeviceMesh


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a mesh. The mesh's other axes, if there are any, split the batch: dim 0.

    Args:
        mesh: All ranks.
        number: Which axis of it.
    """

    mesh: DeviceMesh
    number: int

    def placements(self, layout: Placement, others: Placement) -> list[Placement]:
        """``layout`` along the axis, ``others`` along each other one."""
        return [layout if axis == self.number else others for axis in range(self.mesh.ndim)]

    def annotate(
        self, value: Any, layout: Placement, what: str, extent: int | None = None
    ) -> DTensor:
        """A tensor as a DTensor; a plain one is this rank's part of one that lies as ``layout``.

        Collective over the mesh for a plain tensor that is cut, for its global shape to be known.

        Args:
            value: The tensor.
            layout: Along the axis; along others the plain tensor is cut in dim 0.
            what: What it is, for errors.
            extent: The global size of the dim that ``layout`` cuts, where it is known.

        Raises:
            TypeError: It is no tensor.
            ValueError: It is a DTensor on another mesh.
        """
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} has the layout {layout}, but is no tensor: {type(value).__name__}. "
                f"Give None as the layout of what is to stay as it is"
            )
        if isinstance(value, DTensor):
            if value.device_mesh != self.mesh:
                raise ValueError(
                    f"{what} is a DTensor on {value.device_mesh}, but the module is parallel on "
                    f"{self.mesh}: distribute both over one mesh"
                )
            return value
        shape = self._whole_shape(value, layout, extent)
        placements = self.placements(layout, Shard(0))
        return DTensor.from_local(value, self.mesh, placements, shape=shape)

    def _whole_shape(
        self, part: Tensor, layout: Placement, extent: int | None
    ) -> Sequence[int] | None:
        """The global shape, where no other rank has to be asked."""
        if extent is None or self.mesh.ndim > 1 or not isinstance(layout, Shard) or layout.sizes:
            return None
        if not part.ndim or part.shape[layout.dim] * self.mesh.size() != extent:
            return None
        shape = list(part.shape)
        shape[layout.dim] = extent
        return shape

    def move(self, tensor: DTensor, layout: Placement) -> DTensor:
        """The tensor, laid out so along the axis. Collective where something moves."""
        spec = tensor._spec
        placements = list(spec.placements)
        placements[self.number] = layout
        target = spec.with_placements(placements, spec.order)
        if target == spec:
            return tensor  # itself, so that all who use it share the sum of its gradient's terms
        return tensor.redistribute(placements=target.placements, order=target.order)

    def move_input(self, tensor: DTensor, layout: Placement) -> DTensor:
        """:meth:`move`; of its gradient's terms each rank then gets only what it needs."""
        moved = self.move(tensor, layout)
        if moved is not tensor and layout.is_replicate():
            partial_grads.route_partial_grads(moved, tensor, (self.number,))
        return moved
