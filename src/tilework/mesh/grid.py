"""The ranks of a mesh in a grid: the place of this rank, and the groups through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import new_group
from tilework.comm.world import current_world, get_default_group, get_rank
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import TorchMeshNames


@dataclass(eq=False)
class MeshesOfRank:
    """The meshes that one rank has made, and those that are current by ``with mesh:``."""

    #: Those that ``with mesh:`` made the current ones, innermost last.
    entered: list[Any] = field(default_factory=list)
    #: By content, for those that come out of files.
    known: WeakValueDictionary[tuple[str, MeshSpec], Any] = field(
        default_factory=WeakValueDictionary
    )

    def forget_groups(self) -> None:
        """Forget all meshes, because ranks have got other numbers."""
        self.known.clear()


def meshes_of_rank() -> list[Any]:
    """The meshes that the calling rank has made, and that are in use."""
    return list(current_world().state(MeshesOfRank).known.values())


class MeshGrid(TorchMeshNames):
    """Methods of a mesh that concern no other mesh: the ranks, this rank's place, the groups."""

    _groups: list[ProcessGroup]
    #: The mesh of which this is a part, or this mesh.
    _root: Any

    def _set(self, device_type: str, spec: MeshSpec, root: Any) -> None:
        self.device_type = device_type
        self.spec = spec
        self._coordinate = spec.coordinate(get_rank())
        self._root = root or self
        #: True if all ranks of the default group made it together: those outside know of it.
        self.made_by_all = False
        self._groups = []
        #: Those made by flatten(), of the root: by name.
        self._flat: dict[str, Any] = {}
        #: Those made by axes_group(), of the root: by their ranks.
        self._crossing: dict[tuple[int, ...], ProcessGroup] = {}
        #: Layouts of tensors on the mesh, by content, which higher layers keep as long as it.
        self.specs: dict[Any, Any] = {}
        #: Likewise: shardings of calls on them, by signature.
        self.op_shardings: dict[Any, Any] = {}
        #: Likewise: the calls that the mesh's ranks have made together.
        self.call_counts: Any = None
        #: torch's mesh of the same ranks, where there is one.
        self._torch: Any = None
        #: Those made for the mesh's parts, of the root: by content.
        self._torch_parts: dict[MeshSpec, Any] = {}
        #: Those made by mesh[...] or flatten(), of the root: by content. They are kept, as ranks
        #: compare their counts, and would drop them at different times.
        self._parts: dict[MeshSpec, Any] = {}
        #: That which flatten() made it of.
        self._flat_of: Any = None
        #: The seats of the mesh's ranks, which stay when ranks get other numbers.
        self._seats = seats_of(spec.ranks)
        #: True if this rank is in the mesh.
        self.here = self._coordinate is not None
        #: True on the one rank of the mesh that reports facts which all ranks share.
        self.is_first = get_rank() == min(spec.ranks)

    def _new_group(self, ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
        group = get_default_group()
        if backend is None and sorted(ranks) == list(range(group.size())):
            return group
        made = new_group(ranks, backend=backend, use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        return made

    @property
    def mesh(self) -> Tensor:
        """The global ranks: an integer tensor of the mesh's shape."""
        return torch.tensor(self.spec.ranks, dtype=torch.int).reshape(self.spec.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes; None if the axes have no names."""
        return self.spec.names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.spec.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self.spec.shape

    @cached_property
    def descending_axis(self) -> int | None:
        """The first axis along which ranks do not ascend everywhere; None if there is none."""
        return self.spec.descending_axis()

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks along an axis; of the whole mesh if ``mesh_dim`` is None."""
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.size()
        return self.spec.size if mesh_dim is None else self.shape[self.spec.axis(mesh_dim)]

    def get_rank(self) -> int:
        """This rank's global number."""
        return get_rank()

    def get_coordinate(self) -> list[int] | None:
        """This rank's index along each axis; None if this rank is not in the mesh."""
        return None if self._coordinate is None else list(self._coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index along an axis, which may be left out in a mesh of a single axis."""
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.get_local_rank()
        return self._here()[self._axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group of the ranks along an axis through this rank, in ascending global order.

        The axis may be left out in a mesh of a single axis.
        """
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.get_group()
        axis = self._axis(mesh_dim, "get_group")
        self._here()
        return self._groups[axis]

    def get_all_groups(self) -> list[ProcessGroup]:
        """The group through this rank along each axis, in the order of axes."""
        self._here()
        return list(self._groups)

    def axes_group(self, axes: Iterable[int]) -> ProcessGroup:
        """The group of the ranks along several axes through this rank, as along a single axis.

        If more than one of the axes is longer than 1, the first call makes the group: collective
        over these ranks; blocks. Later calls return the same group, also on parts of the mesh.
        """
        self._here()
        distinct = sorted(set(axes))
        long = [axis for axis in distinct if self.shape[axis] > 1] or distinct[:1]
        if len(long) == 1:
            return self._groups[long[0]]
        ranks = tuple(sorted(self.spec.through(long, get_rank()).ranks))
        known: dict[tuple[int, ...], ProcessGroup] = self._root._crossing
        if ranks not in known:
            known[ranks] = self._new_group(ranks)
        return known[ranks]

    def _flattened(self, name: int | str | None) -> MeshGrid | None:
        """The mesh that flatten() has made by the name ``name``; None if it made none."""
        if not isinstance(name, str) or name in (self.mesh_dim_names or ()):
            return None
        made: MeshGrid | None = self._root._flat.get(name)
        return made

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"{type(self).__name__}({self.device_type!r}, {self.spec.nested()}{names})"

    def _here(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise RuntimeError(
                f"rank {get_rank()} is not in the mesh of ranks {list(self.spec.ranks)}: "
                f"ask get_coordinate() first, which is None on ranks outside the mesh"
            )
        return self._coordinate

    def _axis(self, which: int | str | None, what: str) -> int:
        if which is not None:
            return self.spec.axis(which)
        if self.ndim != 1:
            raise RuntimeError(
                f"Found the DeviceMesh have {self.ndim} dimensions ({self.spec}): {what} needs "
                f"mesh_dim, the number or the name of an axis"
            )
        return 0


def seats_of(ranks: Iterable[int]) -> tuple[int, ...]:
    """The seat of each rank: the number that it was started with, which stays."""
    seats = current_world().seats
    return tuple(seats[rank] if rank < len(seats) else rank for rank in ranks)
