"""The mesh axis along which a module is parallel, and the placements of tensors along it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.dtensor import DTensor
from tilework.dtensor.internal import (
    Cut,
    CutLayer,
    RankPart,
    as_rank_part,
    cut_of,
    layout_of,
    note_input,
    note_output,
    plain_of,
    refuse_torch_dtensor,
    route_partial_grads,
)
from tilework.errors import CollectiveMismatchError
from tilework.layout import Placement, Shard
from tilework.mesh import DeviceMesh
from tilework.parallel.passes import is_due


@dataclass(frozen=True)
class MeshAxis:
    """An axis, of this number, of a mesh. The other axes, if there are any, shard the batch: dim 0.

    Errors name the ``layer`` that is parallel along the axis, and names of the plan that fit no
    module.
    """

    mesh: DeviceMesh
    number: int
    layer: str = "the module"
    unmatched: tuple[str, ...] = ()
    _layers: dict[ProcessGroup, CutLayer] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    #: The calls without gradients, by the shape of the output.
    _calls: Counter[torch.Size] = field(
        default_factory=Counter, init=False, repr=False, compare=False
    )

    def placements(self, layout: Placement, others: Placement) -> list[Placement]:
        return [layout if axis == self.number else others for axis in range(self.mesh.ndim)]

    def annotate(
        self, value: Any, layout: Placement, what: str, extent: int | None = None
    ) -> DTensor:
        """The tensor as a DTensor; a plain tensor is taken as the local part in this layout along
        the axis; along other axes it is sharded in dim 0.

        Collective over the mesh for a plain tensor that is sharded, to find the global shape,
        unless the ``extent`` of the dim that ``layout`` shards is known. Raises TypeError for
        anything but a tensor, ValueError for a DTensor on another mesh, CollectiveMismatchError
        where ranks of the axis, which should replicate a plain tensor, have other ones.
        """
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} has the layout {layout}, but is not a tensor: {type(value).__name__}. "
                f"Give None as the layout of an input that stays as it is"
            )
        refuse_torch_dtensor(value, what)
        if isinstance(value, RankPart) and (cut := cut_of(value)) is not None:
            self._check_cut(cut, value.dim(), layout, what)
        value = plain_of(value)
        if isinstance(value, DTensor):
            if value.device_mesh != self.mesh:
                raise ValueError(
                    f"{what} is a DTensor on {value.device_mesh}, but the module is parallel on "
                    f"{self.mesh}: distribute both over one mesh"
                )
            note_input(value, was_plain=False)
            return value
        shape = self._global_shape(value, layout, extent)
        placements = self.placements(layout, Shard(0))
        try:
            tensor = DTensor.from_local(value, self.mesh, placements, shape=shape)
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(
                f"{what} is a plain tensor, and does not fit the module's plan: {error}\n"
                f"The tensor must be this rank's rows along {self._names(others=True)} of the mesh "
                f"and {layout} along {self._names()}, the plan's axis. Pass such a tensor on every "
                f"rank, declare another layout in the plan, or pass a DTensor.",
                ranks=error.ranks,
            ) from None
        note_input(tensor, was_plain=True)
        return tensor

    def _check_cut(self, cut: Cut, ndim: int, layout: Placement, what: str) -> None:
        """Raise if a part is known to be cut otherwise than ``layout`` says. Local."""
        if cut.dim is None or (cut.layer.mesh, cut.layer.axis) != (self.mesh, self.number):
            return
        dim = cut.dim % ndim
        shard = layout if isinstance(layout, Shard) else None
        fits = shard and (shard.dim % ndim, shard.turns) == (dim, cut.layer.turns)
        if not fits or not cut.leads:
            how = "" if cut.leads else ", where another dim was merged before it"
            raise ValueError(
                f"{what} is this rank's part of the output of {cut.layer.name}, cut in dim {dim} "
                f"of {ndim}{how}\n"
                f"The plan takes it as {layout}: the features would be mixed between ranks. Bring "
                f"the cut dim to the place that the layer takes, as transpose(1, 2).flatten(2) "
                f"does with heads, or declare input_layouts"
            )

    def _names(self, others: bool = False) -> str:
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        chosen = [n for i, n in enumerate(names) if (i != self.number) is others]
        return ", ".join(map(repr, chosen)) or "no other axis"

    def to_local(self, tensor: DTensor) -> Tensor:
        """The local tensor of a DTensor, for use by plain operators. Local.

        If it is only a part, the result is a :class:`~tilework.dtensor.rank_part.RankPart`:
        operators that need all of the cut dim raise, and the gradient of a plain parameter that
        meets it in an operator is summed over the ranks that hold the other parts. Without
        gradients this is so in the first calls, and now and then.
        """
        local = tensor.to_local()
        note_output(tensor, local)
        spec = layout_of(tensor)
        if spec.is_replicated or not spec.takes_part or not self._follows(local):
            return local
        axes = [a for a, placement in enumerate(spec.placements) if not placement.is_replicate()]
        group = spec.mesh.axes_group(axes)
        if group.size() == 1:
            return local
        layer = self._layers.get(group)
        if layer is None:
            layer = CutLayer(group, self.mesh, self.number, self.layer, self.unmatched)
            self._layers[group] = layer
        placement = spec.placements[self.number]
        dim = placement.dim - tensor.ndim if isinstance(placement, Shard) else None
        # A reduction over rows gives this rank's share of a loss: rows are not followed.
        is_row = dim is not None and tensor.ndim > 1 and dim == -tensor.ndim
        if dim is None or is_row:
            return as_rank_part(local, layer.cut(None))
        layer.sizes = tensor.shape[dim], local.shape[dim]
        layer.turns = placement.turns if isinstance(placement, Shard) else 1
        return as_rank_part(local, layer.cut((dim, True)))

    def _follows(self, local: Tensor) -> bool:
        """True if operators on an output are followed: with gradients always, else now and then."""
        if torch.is_grad_enabled():
            return True
        self._calls[local.shape] += 1
        return is_due(self._calls[local.shape])

    def _global_shape(
        self, local: Tensor, layout: Placement, extent: int | None
    ) -> Sequence[int] | None:
        """The global shape; None if it takes communication to find out."""
        if extent is None or self.mesh.ndim > 1 or not isinstance(layout, Shard) or layout.sizes:
            return None
        if not local.ndim or local.shape[layout.dim] * self.mesh.size() != extent:
            return None
        shape = list(local.shape)
        shape[layout.dim] = extent
        return shape

    def move(self, tensor: DTensor, layout: Placement) -> DTensor:
        """The tensor with this layout along the axis. Collective where something moves."""
        spec = layout_of(tensor)
        placements = list(spec.placements)
        placements[self.number] = layout
        target = spec.with_placements(placements, spec.order)
        if target == spec:
            return tensor  # unchanged, so that all users share one reduction of the gradient
        return tensor.redistribute(placements=target.placements, order=target.order)

    def move_input(self, tensor: DTensor, layout: Placement) -> DTensor:
        """Move an input of a module, as :meth:`move` does.

        In backward, a partial gradient of the result is reduced straight into the layout of
        ``tensor``, not to a full gradient first.
        """
        moved = self.move(tensor, layout)
        if moved is not tensor and layout.is_replicate():
            route_partial_grads(moved, tensor, (self.number,))
        return moved
