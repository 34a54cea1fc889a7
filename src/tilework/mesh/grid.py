"""The ranks of a mesh in a grid, the groups through this rank, and meshes made of the mesh."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import new_group
from tilework.comm.world import current_world, get_default_group, get_rank, get_world_size
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import backends_of_axes, torch_part

_Mesh = TypeVar("_Mesh", bound="MeshGrid")


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


class MeshGrid:
    """A grid of ranks, and other meshes made of them."""

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

    # -- other meshes ----------------------------------------------------------------------------

    def __getitem__(self: _Mesh, names: str | Sequence[str]) -> _Mesh:
        """The part of the mesh through this rank along the named axes, in the order of the names.

        Local; shares the mesh's groups. Axes made by :meth:`flatten` can be named, too. The same
        names give the same mesh object each time.

        Raises:
            KeyError: There is no axis of that name.
            TypeError: ``names`` are not names.
            RuntimeError: This rank is not in the mesh.
        """
        wanted = self._wanted(names)
        if wanted == self.mesh_dim_names:
            return self
        flat = cast("list[_Mesh | None]", [self._flattened(name) for name in wanted])
        if len(wanted) == 1 and flat[0] is not None:
            return flat[0]
        self._here()
        if len(wanted) == 1 and wanted[0] not in (
            *(self.mesh_dim_names or ()),
            *(self._root.mesh_dim_names or ()),
        ):
            theirs = torch_part(self._root._torch, wanted)  # that torch's flattening made
            if theirs is not None:
                return self._from_torch(theirs)
        part = self._part(wanted)
        same: _Mesh | None = self._root._parts.get(part)
        if same is not None:
            return same  # with the layouts and calls that are remembered for it
        groups = [
            self._groups[self.spec.axis(name)] if made is None else made._groups[0]
            for name, made in zip(wanted, flat, strict=True)
        ]
        return self._related(part, groups)

    def _wanted(self, names: Any) -> tuple[str, ...]:
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, (list, tuple)):
            known = ", ".join(self.mesh_dim_names or ()) or "none: give some as mesh_dim_names"
            raise TypeError(
                f"mesh[…] takes names of axes, which are here {known}; got {names!r}. size(), "
                f"get_group() and get_local_rank() also take the number of an axis"
            )
        return tuple(wanted)

    def _part(self, names: Sequence[str]) -> MeshSpec:
        if all(self._flattened(name) is None for name in names):
            return self.spec.through(names, get_rank())
        for name in names:
            if self._flattened(name) is None:
                self.spec.axis(name)  # of this mesh, not only of the root
        axes = [axis for name in names for axis in self.root_axes(name)]
        shape = tuple(self.size(name) for name in names)
        return MeshSpec(shape, self._root.spec.through(axes, get_rank()).ranks, tuple(names))

    def has_part(self, spec: MeshSpec) -> bool:
        """True if this is a whole mesh, and ``spec`` the part through this rank along some axes."""
        try:
            return self._root is self and self._part(spec.names or ()) == spec
        except (KeyError, ValueError):  # no such axes, or this rank is outside
            return False

    def root_axes(self, name: str) -> tuple[str, ...]:
        """The axes of the root mesh that ``name`` consists of: several if flatten() made it."""
        root: MeshGrid = self._root
        made = root._flattened(name)
        if made is None or made._flat_of is None:
            root.spec.axis(name)
            return (name,)
        inner = made._flat_of.mesh_dim_names or (name,)
        return tuple(axis for each in inner for axis in root.root_axes(each))

    def flatten(
        self: _Mesh, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> _Mesh:
        """A mesh of one axis with all ranks of this mesh; this mesh itself if it is that already.

        Collective over the ranks of this mesh (each rank calls it on the part through that rank);
        blocks. The result is remembered: later calls return it, and the mesh that this mesh is a
        part of has it as an axis, by name: ``mesh["dp_cp", "tp"]``.

        Args:
            mesh_dim_name: The axis's name; by default all names joined by underscores.
            backend_override: The backend of the group: a name, or a pair of it and options.

        Raises:
            ValueError: The mesh that this mesh is a part of has another axis of that name.
        """
        self._here()
        spec = self.spec.flattened(mesh_dim_name)
        if spec == self.spec:
            return self
        (name,) = spec.names or ("",)
        known: _Mesh | None = self._root._flat.get(name)
        if known is not None and known.spec == spec:
            return known
        if known is not None or (name and name in (self._root.mesh_dim_names or ())):
            raise ValueError(
                f"{name!r} is an axis already, of other ranks: give flatten() another name"
            )
        (backend,) = backends_of_axes(backend_override and [backend_override], spec.names, 1)
        is_line = self.ndim == 1 and backend is None
        group = self._groups[0] if is_line else self._new_group(spec.ranks, backend)
        mesh = self._related(spec, [group])
        mesh._flat_of = self
        if name:
            self._root._flat[name] = mesh
        return mesh

    def unflatten(
        self: _Mesh,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Iterable[str],
        backend_override: Any = None,
    ) -> _Mesh:
        """A new mesh of the same ranks, with one axis replaced by several.

        Collective over the ranks of this mesh (each rank calls it on the part through that rank);
        blocks. The groups of the other axes are shared with this mesh.

        Args:
            mesh_sizes: The lengths of the new axes; the product is the length of the old axis.
            backend_override: The backends of the new axes' groups, as for :class:`DeviceMesh`.

        Raises:
            ValueError: The lengths or names do not fit.
            KeyError: There is no axis of that name.
        """
        self._here()
        spec, axis = self.spec.unflattened(dim, mesh_sizes, mesh_dim_names)
        count = spec.ndim - self.ndim + 1
        new_names = spec.names and spec.names[axis : axis + count]
        backends = backends_of_axes(backend_override, new_names, count)
        mesh: _Mesh = object.__new__(type(self))
        mesh._set(self.device_type, spec, None)
        made = [
            self._new_group(spec.line(axis + number, get_rank()), backends[number])
            for number in range(count)
        ]
        mesh._groups = [*self._groups[:axis], *made, *self._groups[axis + 1 :]]
        return mesh

    @staticmethod
    def concatenate(meshes: Sequence[_Mesh]) -> _Mesh:
        """The part of a mesh along all axes of ``meshes``, which are parts of it. Local.

        Raises:
            ValueError: ``meshes`` are not parts of one mesh, have no names, or share an axis.
        """
        parts = list(meshes)
        names = [name for part in parts for name in part.mesh_dim_names or ()]
        alike = {id(part._root) for part in parts}
        if len(alike) != 1 or len(names) != sum(part.ndim for part in parts):
            raise ValueError(
                f"concatenate takes parts of one mesh whose axes have names, such as "
                f"mesh['dp'] and mesh['tp']; got {parts}"
            )
        whole: _Mesh = parts[0]._root
        return whole[names]

    def shrink(self: _Mesh, axis: int | str = 0) -> _Mesh:
        """The mesh of the ranks that are left, once the default group has shrunk or grown.

        Collective over all ranks of the default group; makes new groups; blocks. A mesh of one axis
        loses the ranks that were lost. A mesh of several axes loses whole slices across ``axis``: a
        slice (the ranks with the same index along ``axis``) goes if a rank in it was lost, so that
        the other axes keep their lengths. Of ``dp=3 tp=2`` without rank 3, rows 0 and 2 are left.
        Ranks that live in a lost slice are outside the new mesh. A rank that was started again has
        the same place as before.

        The groups of the old mesh are closed: tensors on it must be laid out on the new mesh.

        Args:
            axis: The axis that becomes shorter, of which ranks hold replicas as a rule.

        Raises:
            ValueError: A rank was lost in every slice; on all ranks.
            RuntimeError: This mesh is a part of another mesh: shrink that mesh.
        """
        whole: _Mesh = self._root
        if whole is not self:
            raise RuntimeError(
                f"the mesh {self.spec} is a part of {whole.spec}: let that shrink, and take "
                f"the part again"
            )
        now = {seat: rank for rank, seat in enumerate(seats_of(range(get_world_size())))}
        here = dict(zip(self.spec.ranks, self._seats, strict=True))
        lost = [rank for rank, seat in here.items() if seat not in now]
        left = self.spec.without(lost, axis)
        ranks = tuple(now[here[rank]] for rank in left.ranks)
        return self._made_by_all(MeshSpec(left.shape, ranks, left.names))

    # torch's names
    _flatten, _unflatten, _concatenate = flatten, unflatten, concatenate

    def _related(self: _Mesh, spec: MeshSpec, groups: list[ProcessGroup]) -> _Mesh:
        mesh: _Mesh = object.__new__(type(self))
        mesh._set(self.device_type, spec, self._root)
        mesh._groups = groups
        self._root._parts.setdefault(spec, mesh)
        current_world().state(MeshesOfRank).known.setdefault((self.device_type, spec), mesh)
        return mesh

    @abstractmethod
    def _made_by_all(self: _Mesh, spec: MeshSpec) -> _Mesh:
        """A mesh of ``spec`` on the same devices, with new groups. Collective over all ranks."""

    @abstractmethod
    def _from_torch(self: _Mesh, mesh: Any) -> _Mesh:
        """The tilework mesh on the ranks and groups of ``mesh``, a torch mesh."""


def seats_of(ranks: Iterable[int]) -> tuple[int, ...]:
    """The seat of each rank: the number that it was started with, which stays."""
    seats = current_world().seats
    return tuple(seats[rank] if rank < len(seats) else rank for rank in ranks)
