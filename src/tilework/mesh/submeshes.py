"""Meshes made of another mesh: parts of it, other axes, the ranks that are left."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world, get_rank, get_world_size
from tilework.mesh.grid import MeshesOfRank, MeshGrid, seats_of
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import backends_of_axes, torch_part

_Mesh = TypeVar("_Mesh", bound="MeshSlicing")


class MeshSlicing(MeshGrid):
    """The operations of :class:`~tilework.mesh.DeviceMesh` that give another mesh."""

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
        """The spec of the part through this rank along axes, some made by flatten()."""
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
        """The axes of the root mesh that the axis ``name`` consists of: several if flatten() made
        it.
        """
        root: MeshSlicing = self._root
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
            dim: The axis, by number or name.
            mesh_sizes: The lengths of the new axes; the product is the length of the old axis.
            mesh_dim_names: The names of the new axes.
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
