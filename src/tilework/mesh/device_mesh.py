"""Meshes of this job's ranks, with a process group along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import init_process_group, new_group
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    current_world,
    get_default_group,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
    native_group,
    resolve,
)
from tilework.layout.torch_callers import refuse_torch_caller
from tilework.mesh.devices import check_device_type
from tilework.mesh.same_mesh import check_same, ranks_there
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import (
    adopt_torch_world,
    flattened_in_torch,
    is_torch_mesh,
    new_torch_mesh,
    torch_part,
)
from tilework.mesh.torch_names import TorchMeshNames, backends_of_axes

_OURS = "a mesh of tilework's: torch.distributed's functions take to_torch() of it"


@dataclass(eq=False)
class _Meshes:
    """The meshes of one rank."""

    #: Those that ``with mesh:`` made the current ones, innermost last.
    entered: list[DeviceMesh] = field(default_factory=list)
    #: By content, for those that come out of files.
    known: WeakValueDictionary[tuple[str, MeshSpec], DeviceMesh] = field(
        default_factory=WeakValueDictionary
    )

    def forget_groups(self) -> None:
        """Forget meshes of ranks that have other numbers now."""
        self.known.clear()


class DeviceMesh(TorchMeshNames):
    """Ranks in a grid, with a process group along each axis through this rank.

    Collective over *all* ranks of the default group, also those outside the mesh; blocks. Meshes
    are equal, and hash alike, if they have the same devices, ranks, shape and names.

    Args:
        device_type: Where tensors on the mesh live: ``"cpu"``, ``"cuda"``, ….
        mesh: Global ranks: a tensor or nested sequences, or a :class:`MeshSpec`.
        mesh_dim_names: A name for each axis.
        backend_override: The backend of the groups along some axes: a dict by number or name of
            the axis, or a sequence with one, or None, for each axis.

    Raises:
        ValueError: A rank comes twice, the names do not fit, or ranks gave different meshes.
        RuntimeError: There are fewer ranks than the mesh needs, or the device type has an index.

    Example:
        >>> from tilework.mesh import DeviceMesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["dp"].get_local_rank()
        >>> run_ranks(4, program)
        [([0, 0], 0), ([0, 1], 0), ([1, 0], 1), ([1, 1], 1)]
    """

    _groups: list[ProcessGroup]

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Iterable[str] | None = None,
        backend_override: Any = None,
    ) -> None:
        spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.of(mesh, mesh_dim_names)
        if isinstance(mesh, MeshSpec) and mesh_dim_names is not None:
            spec = spec.named(mesh_dim_names)
        check_device_type(device_type)
        if not is_initialized():
            init_process_group()
        backends = check_same(device_type, spec, backend_override)
        self._set(device_type, spec, None)
        self.made_by_all = True
        if self._coordinate is not None:
            self._groups = [
                self._new_group(spec.line(axis, get_rank()), backends[axis])
                for axis in range(spec.ndim)
            ]
        current_world().state(_Meshes).known[device_type, spec] = self

    def _set(self, device_type: str, spec: MeshSpec, root: DeviceMesh | None) -> None:
        self.device_type = device_type
        self.spec = spec
        self._coordinate = spec.coordinate(get_rank())
        self._root = root or self
        #: True if all ranks of the default group made it together: those outside know of it.
        self.made_by_all = False
        self._groups = []
        #: Those made by flatten(), of the root: by name.
        self._flat: dict[str, DeviceMesh] = {}
        #: Those made by axes_group(), of the root: by their ranks.
        self._crossing: dict[tuple[int, ...], ProcessGroup] = {}
        #: Layouts of tensors on the mesh, by content, which higher layers keep as long as it.
        self.specs: dict[Any, Any] = {}
        #: Likewise: shardings of calls on them, by signature.
        self.op_shardings: dict[Any, Any] = {}
        #: Likewise: the calls that the mesh's ranks have made together.
        self.history: Any = None
        #: torch's mesh of the same ranks, where there is one.
        self._torch: Any = None
        #: Those made for the mesh's parts, of the root: by content.
        self._torch_parts: dict[MeshSpec, Any] = {}
        #: That which flatten() made it of.
        self._flat_of: DeviceMesh | None = None
        #: The seats of the mesh's ranks, which stay when ranks get other numbers.
        self._seats = _seats_of(spec.ranks)
        #: True if this rank is in the mesh.
        self.here = self._coordinate is not None
        #: True on one rank of the mesh, which tells what need not be told by each.
        self.is_first = get_rank() == min(spec.ranks)

    def _new_group(self, ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
        group = get_default_group()
        if backend is not None or sorted(ranks) != list(range(group.size())):
            made = new_group(ranks, backend=backend, use_local_synchronization=True)
            assert isinstance(made, ProcessGroup)
            group = made
        group.of_mesh = True
        return group

    # -- what it is --------------------------------------------------------------------------

    @property
    def mesh(self) -> Tensor:
        """The global ranks: an integer tensor of the mesh's shape."""
        return torch.tensor(self.spec.ranks, dtype=torch.int).reshape(self.spec.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axes' names."""
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
        """The number of ranks along an axis; of all if None."""
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.size()
        return self.spec.size if mesh_dim is None else self.shape[self.spec.axis(mesh_dim)]

    def get_rank(self) -> int:
        """This rank's global number."""
        return get_rank()

    def get_coordinate(self) -> list[int] | None:
        """This rank's index along each axis; None if it is not in the mesh."""
        return None if self._coordinate is None else list(self._coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index along an axis, which may be left out if there is but one.

        Raises:
            RuntimeError: This rank is not in the mesh, or the axis must be given.
        """
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.get_local_rank()
        return self._here()[self._axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group along an axis through this rank; the axis may be left out if there is but one.

        The group numbers ranks in ascending order of global ranks, whatever the axis's order.

        Raises:
            RuntimeError: This rank is not in the mesh, or the axis must be given.
        """
        flat = self._flattened(mesh_dim)
        if flat is not None:
            return flat.get_group()
        axis = self._axis(mesh_dim, "get_group")
        self._here()
        return self._groups[axis]

    def get_all_groups(self) -> list[ProcessGroup]:
        """The groups of all axes through this rank."""
        self._here()
        return list(self._groups)

    def axes_group(self, axes: Iterable[int]) -> ProcessGroup:
        """The group of the ranks along some axes through this rank; axes of length 1 do not count.

        The first time, over more than one axis, it is collective over these ranks and blocks, as a
        group is made. It is remembered, and found again by the mesh's parts.

        Args:
            axes: Numbers of one or more axes.

        Raises:
            RuntimeError: This rank is not in the mesh.
        """
        self._here()
        distinct = sorted(set(axes))
        long = [axis for axis in distinct if self.shape[axis] > 1] or distinct[:1]
        if len(long) == 1:
            return self._groups[long[0]]
        ranks = tuple(sorted(self.spec.through(long, get_rank()).ranks))
        known = self._root._crossing
        if ranks not in known:
            known[ranks] = self._new_group(ranks)
        return known[ranks]

    # -- others of it ------------------------------------------------------------------------

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """The part of the mesh through this rank along the named axes, in their order.

        Local; shares the mesh's groups. Axes made by :meth:`flatten` can be named too. It is the
        same mesh each time.

        Raises:
            KeyError: There is no axis of that name.
            TypeError: They are no names.
            RuntimeError: This rank is not in the mesh.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, (list, tuple)):
            known = ", ".join(self.mesh_dim_names or ()) or "none: give some as mesh_dim_names"
            raise TypeError(
                f"mesh[…] takes names of axes, which are here {known}; got {names!r}. size(), "
                f"get_group() and get_local_rank() also take the number of an axis"
            )
        wanted = tuple(wanted)
        if wanted == self.mesh_dim_names:
            return self
        flat = [self._flattened(name) for name in wanted]
        if len(wanted) == 1 and flat[0] is not None:
            return flat[0]
        self._here()
        if len(wanted) == 1 and wanted[0] not in (
            *(self.mesh_dim_names or ()),
            *(self._root.mesh_dim_names or ()),
        ):
            theirs = torch_part(self._root._torch, wanted)  # that torch's flattening made
            if theirs is not None:
                return DeviceMesh.from_torch(theirs)
        part = self._part(wanted)
        same = current_world().state(_Meshes).known.get((self.device_type, part))
        if same is not None and same._root is self._root:
            return same  # with the layouts and calls that are remembered for it
        groups = [
            self._groups[self.spec.axis(name)] if made is None else made._groups[0]
            for name, made in zip(wanted, flat, strict=True)
        ]
        return self._related(part, groups)

    def _flattened(self, name: int | str | None) -> DeviceMesh | None:
        """The mesh that flatten() has made by a name; None where it is an axis here, or nothing."""
        if not isinstance(name, str) or name in (self.mesh_dim_names or ()):
            return None
        return self._root._flat.get(name)

    def _part(self, names: Sequence[str]) -> MeshSpec:
        """The grid through this rank along named axes, of which flatten() may have made some."""
        if all(self._flattened(name) is None for name in names):
            return self.spec.through(names, get_rank())
        for name in names:
            if self._flattened(name) is None:
                self.spec.axis(name)  # of this mesh, not only of the root
        axes = [axis for name in names for axis in self.root_axes(name)]
        shape = tuple(self.size(name) for name in names)
        return MeshSpec(shape, self._root.spec.through(axes, get_rank()).ranks, tuple(names))

    def root_axes(self, name: str) -> tuple[str, ...]:
        """The axes, of the mesh that this one is a part of, that a name stands for.

        Several for what :meth:`flatten` has made.

        Raises:
            KeyError: There is no axis of that name.
        """
        root = self._root
        made = root._flattened(name)
        if made is None or made._flat_of is None:
            root.spec.axis(name)
            return (name,)
        inner = made._flat_of.mesh_dim_names or (name,)
        return tuple(axis for each in inner for axis in root.root_axes(each))

    def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """All ranks of this mesh along one axis; the mesh itself if it has one of that name.

        Collective over the ranks of this mesh (on each rank, its own part); blocks. The result is
        remembered: it is returned again, and found by its name, as an axis, in the mesh that this
        one is a part of: ``mesh["dp_cp", "tp"]``.

        Args:
            mesh_dim_name: The axis's name; by default the names joined by underscores.
            backend_override: The backend of the group: a name, or a pair of it and options.

        Raises:
            ValueError: The mesh it is part of has an axis of that name.
        """
        self._here()
        spec = self.spec.flattened(mesh_dim_name)
        if spec == self.spec:
            return self
        (name,) = spec.names or ("",)
        known = self._root._flat.get(name)
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
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Iterable[str],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """A new mesh of the same ranks, with one axis replaced by several.

        Collective over the ranks of this mesh (on each rank, its own part); blocks. The other axes
        share their groups.

        Args:
            dim: The axis, by number or name.
            mesh_sizes: The lengths of the new axes; the product is the length of the old axis.
            mesh_dim_names: Their names.
            backend_override: The backend of their groups, as for :class:`DeviceMesh`.

        Raises:
            ValueError: The lengths or names do not fit.
            KeyError: There is no axis of that name.

        Example:
            >>> from tilework.mesh import init_device_mesh
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
            ...     return mesh.unflatten("world", (2, 2), ("dp", "tp"))["tp"].spec.ranks
            >>> run_ranks(4, program)
            [(0, 1), (0, 1), (2, 3), (2, 3)]
        """
        self._here()
        spec, axis = self.spec.unflattened(dim, mesh_sizes, mesh_dim_names)
        count = spec.ndim - self.ndim + 1
        new_names = spec.names and spec.names[axis : axis + count]
        backends = backends_of_axes(backend_override, new_names, count)
        mesh = object.__new__(DeviceMesh)
        mesh._set(self.device_type, spec, None)
        made = [
            self._new_group(spec.line(axis + number, get_rank()), backends[number])
            for number in range(count)
        ]
        mesh._groups = [*self._groups[:axis], *made, *self._groups[axis + 1 :]]
        return mesh

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The part of one mesh along the axes of several parts of it, in their order. Local.

        Raises:
            ValueError: They are not parts of one mesh, have no names, or share an axis.

        Example:
            >>> from tilework.mesh import DeviceMesh, init_device_mesh
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
            ...     return DeviceMesh.concatenate([mesh["tp"], mesh["pp"]]).mesh_dim_names
            >>> run_ranks(2, program)[0]
            ('tp', 'pp')
        """
        parts = list(meshes)
        names = [name for part in parts for name in part.mesh_dim_names or ()]
        alike = {id(part._root) for part in parts}
        if len(alike) != 1 or len(names) != sum(part.ndim for part in parts):
            raise ValueError(
                f"concatenate takes parts of one mesh whose axes have names, such as "
                f"mesh['dp'] and mesh['tp']; got {parts}"
            )
        return parts[0]._root[names]

    def shrink(self, axis: int | str = 0) -> DeviceMesh:
        """The mesh of the ranks that are left, once the default group has shrunk or grown.

        Collective over all ranks of the default group; makes new groups; blocks. In a mesh of
        one axis the ranks that were lost are left out. In a mesh of several a slice across ``axis``
        goes as a whole if it has lost a rank, so that the other axes keep their lengths:
        of ``dp=3 tp=2`` without rank 3 the first and the last row are left. Ranks of such a slice
        that live are outside the new mesh. A rank that was started again is in the place of before.

        Tensors on the old mesh, whose groups are closed, are to be laid out anew.

        Args:
            axis: The axis that becomes shorter, of which ranks hold replicas as a rule.

        Raises:
            ValueError: No slice is whole; on all ranks.
            RuntimeError: It is a part of another mesh: that is to shrink.

        Example:
            >>> import tilework.distributed as dist
            >>> from tilework.mesh import init_device_mesh
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     if rank == 1:
            ...         return None  # and ends
            ...     try:
            ...         dist.barrier()
            ...     except dist.PeerLostError:
            ...         dist.shrink_group()
            ...     mesh = mesh.shrink("dp")
            ...     return mesh.shape, mesh.get_coordinate()
            >>> run_ranks(4, program)
            [((1, 2), None), None, ((1, 2), [0, 0]), ((1, 2), [0, 1])]
        """
        if self._root is not self:
            raise RuntimeError(
                f"the mesh {self.spec} is a part of {self._root.spec}: let that shrink, and take "
                f"the part again"
            )
        now = {seat: rank for rank, seat in enumerate(_seats_of(range(get_world_size())))}
        here = dict(zip(self.spec.ranks, self._seats, strict=True))
        lost = [rank for rank, seat in here.items() if seat not in now]
        left = self.spec.without(lost, axis)
        ranks = tuple(now[here[rank]] for rank in left.ranks)
        return DeviceMesh(self.device_type, MeshSpec(left.shape, ranks, left.names))

    def _related(self, spec: MeshSpec, groups: list[ProcessGroup]) -> DeviceMesh:
        mesh = object.__new__(DeviceMesh)
        mesh._set(self.device_type, spec, self._root)
        mesh._groups = groups
        current_world().state(_Meshes).known.setdefault((self.device_type, spec), mesh)
        return mesh

    @staticmethod
    def from_group(
        group: AnyGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Iterable[str] | None = None,
    ) -> DeviceMesh:
        """A mesh over groups that exist. Local; makes no groups.

        Args:
            group: One group, for a mesh of one axis, or one for each axis of ``mesh``.
            device_type: Where tensors on the mesh live.
            mesh: The global ranks; may be left out for one group.
            mesh_dim_names: A name for each axis.

        Raises:
            ValueError: The groups are not those of the mesh's axes through this rank.
        """
        groups_of_axes = list(group) if isinstance(group, Sequence) else [resolve(group)]
        if mesh is None:
            if len(groups_of_axes) != 1:
                raise ValueError(
                    f"{len(groups_of_axes)} groups need a mesh that says how they cross"
                )
            mesh = get_process_group_ranks(groups_of_axes[0])
        check_device_type(device_type)
        spec = MeshSpec.of(mesh, mesh_dim_names)
        device_mesh = object.__new__(DeviceMesh)
        device_mesh._set(device_type, spec, None)
        groups = [each for each in groups_of_axes if not isinstance(each, NonMember)]
        if device_mesh._coordinate is not None:
            lines = [sorted(spec.line(axis, get_rank())) for axis in range(spec.ndim)]
            ranks = [sorted(get_process_group_ranks(each)) for each in groups]
            if ranks != lines:
                raise ValueError(
                    f"the groups have the ranks {ranks}, but the mesh's axes through rank "
                    f"{get_rank()} have {lines}"
                )
            device_mesh._groups = groups
        return device_mesh

    # -- torch's meshes ----------------------------------------------------------------------

    @staticmethod
    def from_torch(mesh: Any) -> DeviceMesh:
        """The mesh of the same ranks, on the groups that one of torch.distributed's runs on. Local.

        Where tilework has no default group yet, torch's becomes it. A mesh that came from
        :meth:`to_torch` gives the one that it was made of.

        Args:
            mesh: A torch.distributed.device_mesh.DeviceMesh, after
                ``torch.distributed.init_process_group("tilework")``.

        Raises:
            TypeError: It is no such mesh, or the groups are on torch's own backends.
            ValueError: tilework's ranks are numbered otherwise than torch's.
        """
        if isinstance(mesh, DeviceMesh):
            return mesh
        if not is_torch_mesh(mesh):
            raise TypeError(f"from_torch takes a mesh of torch.distributed's, got {mesh!r}")
        known = getattr(mesh, "_tilework_mesh", None)
        if isinstance(known, DeviceMesh):
            return known
        if adopt_torch_world():
            current_world().state(_Meshes).forget_groups()
        groups = [] if mesh.get_coordinate() is None else mesh.get_all_groups()
        native = [group for group in map(native_group, groups) if isinstance(group, ProcessGroup)]
        spec = MeshSpec.of(mesh.mesh.tolist(), mesh.mesh_dim_names)
        key = mesh.device_type, spec
        meshes = current_world().state(_Meshes).known
        device_mesh = meshes.get(key)
        if device_mesh is None or device_mesh._groups != native:
            device_mesh = object.__new__(DeviceMesh)
            device_mesh._set(mesh.device_type, spec, None)
            device_mesh._groups = native
            meshes[key] = device_mesh
        device_mesh._link(mesh)
        return device_mesh

    def to_torch(self) -> Any:
        """torch.distributed's mesh of the same ranks.

        If this mesh came from a mesh of torch's, that mesh or the part of it. Else a mesh with new
        groups, which is made once: collective over *all* ranks of torch's default group; blocks.
        A mesh that :meth:`flatten` made, or with axes in another order, needs new groups, too.

        Raises:
            RuntimeError: torch.distributed is not initialized.
        """
        if self._torch is None:
            made = self._root._torch_parts
            known = self._part_in_torch() or made.get(self.spec)
            if known is None:
                known = new_torch_mesh(self.device_type, self.mesh, self.mesh_dim_names)
                made[self.spec] = known
            self._link(known)
        return self._torch

    def _part_in_torch(self) -> Any:
        """The part of the root's mesh of torch's that has the same ranks; None if there is none."""
        whole, names = self._flat_of or self, self.mesh_dim_names
        part = torch_part(self._root._torch, whole.mesh_dim_names)
        if part is None or names is None or whole is self:
            return part
        return flattened_in_torch(part, names[0])

    @property
    def _is_current_rank_part_of_mesh(self) -> NoReturn:
        """Refuse torch.distributed.tensor, which asks this of a mesh before anything else."""
        raise TypeError(f"{self!r} is {_OURS}")

    def __bool__(self) -> bool:
        refuse_torch_caller(self, _OURS)
        return True

    def __len__(self) -> NoReturn:
        refuse_torch_caller(self, _OURS)  # which takes it for ranks
        raise TypeError(f"{self!r} has no len(): size() is the number of its ranks")

    _layout = _rank_map = _get_root_mesh = _is_current_rank_part_of_mesh
    _get_or_create_default_group = _is_current_rank_part_of_mesh

    def _link(self, mesh: Any) -> None:
        """Remember that torch's mesh is of the same ranks."""
        if self._torch is None:
            self._torch = mesh
        mesh._tilework_mesh = self

    # -- Python's own ------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:
        current_world().state(_Meshes).entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        current_world().state(_Meshes).entered.pop()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self.device_type == other.device_type and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((self.device_type, self.spec))

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {self.spec.nested()}{names})"

    def __copy__(self) -> DeviceMesh:
        return self  # the groups have one owner

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        spec = self.spec
        return find_or_make, (self.device_type, spec.shape, spec.ranks, spec.names)

    # -- checks ------------------------------------------------------------------------------

    def _here(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise RuntimeError(
                f"rank {get_rank()} is not in the mesh of ranks {list(self.spec.ranks)}: "
                f"ask get_coordinate() first, which is None here"
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


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Iterable[str] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """A mesh of all ranks, in their order. Collective over all ranks; blocks.

    Args:
        device_type: Where tensors on the mesh live.
        mesh_shape: The number of ranks along each axis; their product is the number of ranks.
        mesh_dim_names: A name for each axis.
        backend_override: As for :class:`DeviceMesh`.

    Raises:
        RuntimeError: The job has not as many ranks.
        ValueError: An axis would have no ranks.
        TypeError: The shape is one number, or has something else than numbers.

    Example:
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh["tp"].size(), mesh["tp", "dp"].shape
        >>> run_ranks(2, program)[0]
        (2, (2, 1))
    """
    if isinstance(mesh_shape, int):
        raise TypeError(
            f"mesh_shape has the number of ranks along each axis, such as ({mesh_shape},), "
            f"got {mesh_shape}"
        )
    check_device_type(device_type)
    spec = MeshSpec.regular(mesh_shape, mesh_dim_names)
    if not is_initialized():
        init_process_group()
    if spec.size != get_world_size():
        raise RuntimeError(
            f"Mesh should have as many ranks as the default process group: shape "
            f"{tuple(mesh_shape)} needs {spec.size}, but there {ranks_there(spec.size)}"
        )
    return DeviceMesh(device_type, spec, backend_override=backend_override)


def mesh_or_current(mesh: Any) -> DeviceMesh:
    """The mesh that a function was given; the innermost of ``with mesh:`` for None.

    Raises:
        RuntimeError: None is given or active.
        TypeError: It is no mesh, or torch's on groups of torch's own.
    """
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, DeviceMesh):
        return mesh
    if is_torch_mesh(mesh):
        return DeviceMesh.from_torch(mesh)
    hint = "; placements come after the mesh" if isinstance(mesh, (list, tuple)) else ""
    raise TypeError(
        f"a mesh is a DeviceMesh, which init_device_mesh() makes, got {type(mesh).__name__}{hint}"
    )


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``.

    Raises:
        RuntimeError: No mesh is active.

    Example:
        >>> from tilework.mesh import current_mesh, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     with init_device_mesh("cpu", (2,)) as mesh:
        ...         return current_mesh() is mesh
        >>> run_ranks(2, program)
        [True, True]
    """
    entered = current_world().state(_Meshes).entered
    if not entered:
        raise RuntimeError(
            "No device mesh is currently active: pass one, or use `with mesh:`. "
            'init_device_mesh("cpu", (n,)) makes one of n ranks'
        )
    return entered[-1]


def find_or_make(
    device_type: str, shape: Sequence[int], ranks: Sequence[int], names: Sequence[str] | None
) -> DeviceMesh:
    """The mesh that was pickled: this rank's own, else a new one (collective then)."""
    spec = MeshSpec(tuple(shape), tuple(ranks), None if names is None else tuple(names))
    known = current_world().state(_Meshes).known.get((device_type, spec))
    return known or DeviceMesh(device_type, spec)


def _seats_of(ranks: Iterable[int]) -> tuple[int, ...]:
    seats = current_world().seats
    return tuple(seats[rank] if rank < len(seats) else rank for rank in ranks)
