"""Meshes of this job's ranks, with a process group along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import init_process_group
from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    current_world,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
    native_group,
    resolve,
)
from tilework.layout.internal import refuse_torch_caller
from tilework.mesh.grid import MeshesOfRank, MeshGrid
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import (
    adopt_torch_world,
    backends_of_axes,
    is_torch_mesh,
    new_torch_mesh,
    torch_part,
)
from tilework.rendezvous.internal import starting


def check_device_type(device_type: str) -> None:
    """Raise RuntimeError unless ``device_type`` is a kind of device, as "cuda", without index."""
    try:
        if not isinstance(device_type, str | torch.device):
            raise RuntimeError
        index = torch.device(device_type).index if isinstance(device_type, str) else 0
    except RuntimeError:
        raise RuntimeError(
            f"device_type must be a kind of device that torch has, such as 'cpu' or 'cuda'; got "
            f"{device_type!r}"
        ) from None
    if index is not None:
        raise RuntimeError(
            f"device_type must be a kind of device without an index, such as 'cpu' or 'cuda': "
            f"each rank has its own device of that kind; got {device_type!r}"
        )


def check_device_is_there(device_type: str, what: str) -> None:
    """Raise RuntimeError if this process lacks devices of this kind, which ``what`` needs."""
    if device_type in ("cpu", "meta"):
        return
    module = getattr(torch, device_type, None)
    available = getattr(module, "is_available", None)
    if available is not None and not available():
        raise RuntimeError(
            f"{what} needs {device_type} devices, and rank {get_rank()} has none: "
            f"torch.{device_type}.is_available() is False; use 'cpu', or a torch and a machine "
            f"with {device_type}"
        )


def ranks_there(needed: int) -> str:
    """The end of an error: the number of ranks of the job, and advice to get ``needed`` ranks."""
    size = get_world_size()
    if size > needed:
        return f"are {size}. Use DeviceMesh(…) for a mesh of some of the ranks"
    command = starting(needed) if size == 1 else ""
    if command:
        return f"is 1, since no launcher started this process: start it with `{command}`"
    return f"{'is' if size == 1 else 'are'} {size}: start the job with {needed}"


def check_same(device_type: str, spec: MeshSpec, override: Any) -> tuple[str | None, ...]:
    """The backend of the groups along each axis, if all ranks make the same mesh. Collective."""
    backends: tuple[str | None, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal backends
        backends = backends_of_axes(override, spec.names, spec.ndim)
        if spec.size > get_world_size() or max(spec.ranks) >= get_world_size():
            raise RuntimeError(
                f"Mesh should not be bigger than default world size {get_world_size()}, but found "
                f"{spec.size} ranks up to rank {max(spec.ranks)}: {spec.nested()}. There "
                f"{ranks_there(max(spec.ranks) + 1)}"
            )
        if get_rank() in spec.ranks:
            check_device_is_there(device_type, "a mesh")
        return {
            "device_type": device_type,
            "shape": spec.shape,
            "ranks": spec.ranks,
            "names": spec.names,
            "backends": backends,
        }

    agree_equal(facts, what="all ranks must make the same mesh:")
    return backends


_OURS = "a tilework mesh: give torch.distributed's functions the mesh's to_torch()"


class DeviceMesh(MeshGrid):
    """Ranks in a grid, with a process group along each axis through this rank.

    Collective over *all* ranks of the default group, also those outside the mesh; blocks. Meshes
    are equal, and have equal hashes, if they have the same devices, ranks, shape and names.

    Args:
        device_type: Where tensors on the mesh live: ``"cpu"``, ``"cuda"``, ….
        mesh: Global ranks: a tensor or nested sequences, or a :class:`MeshSpec`.
        backend_override: The backends of the groups along some axes: a dict whose keys are numbers
            or names of axes, or a sequence with a backend or None for each axis.

    Raises:
        ValueError: A rank comes twice, the names do not fit, or ranks gave different meshes.
        RuntimeError: There are fewer ranks than the mesh needs, or the device type has an index.
    """

    _root: DeviceMesh

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
        current_world().state(MeshesOfRank).known[device_type, spec] = self

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
            group: The group of a mesh of one axis; or a sequence with the group along each axis of
                ``mesh`` through this rank.
            mesh: The global ranks; may be left out for one group.

        Raises:
            ValueError: The groups are not those of the mesh's axes through this rank.
        """
        groups_of_axes = list(group) if isinstance(group, Sequence) else [resolve(group)]
        if mesh is None:
            if len(groups_of_axes) != 1:
                raise ValueError(
                    f"from_group got {len(groups_of_axes)} groups and no mesh: pass mesh, the grid "
                    f"of global ranks whose axes the groups are"
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

    @property
    def root_mesh(self) -> DeviceMesh:
        """The mesh of which this is a part; this mesh itself if it was made whole. Local."""
        return self._root

    # -- torch's meshes ----------------------------------------------------------------------

    @staticmethod
    def from_torch(mesh: Any) -> DeviceMesh:
        """The tilework mesh on the same ranks and groups as a mesh of torch.distributed. Local.

        If tilework has no default group yet, torch's default group becomes tilework's default
        group. For a mesh that :meth:`to_torch` returned, the result is the mesh that was converted.

        Args:
            mesh: A torch.distributed.device_mesh.DeviceMesh, after
                ``torch.distributed.init_process_group("tilework")``.

        Raises:
            TypeError: ``mesh`` is no mesh of torch.distributed, or the mesh's groups are on torch's
                own backends.
            ValueError: tilework's default group numbers the ranks in another order than torch's.
        """
        if isinstance(mesh, DeviceMesh):
            return mesh
        if not is_torch_mesh(mesh):
            raise TypeError(f"from_torch takes a torch.distributed mesh, got {mesh!r}")
        known = getattr(mesh, "_tilework_mesh", None)
        if isinstance(known, DeviceMesh):
            return known
        if adopt_torch_world():
            current_world().state(MeshesOfRank).forget_groups()
        groups = [] if mesh.get_coordinate() is None else mesh.get_all_groups()
        native = [group for group in map(native_group, groups) if isinstance(group, ProcessGroup)]
        spec = MeshSpec.of(mesh.mesh.tolist(), mesh.mesh_dim_names)
        key = mesh.device_type, spec
        meshes = current_world().state(MeshesOfRank).known
        device_mesh = meshes.get(key)
        if device_mesh is None or device_mesh._groups != native:
            device_mesh = object.__new__(DeviceMesh)
            device_mesh._set(mesh.device_type, spec, None)
            device_mesh._groups = native
            meshes[key] = device_mesh
        device_mesh._link(mesh)
        return device_mesh

    def to_torch(self) -> Any:
        """A mesh of torch.distributed on the same ranks as this mesh.

        If this mesh, or the mesh that it is a part of, came from a torch mesh, the result is
        that mesh or the same part of it. Otherwise the first call makes a mesh with new groups:
        collective over *all* ranks of torch's default group; blocks. A mesh that :meth:`flatten`
        made, or with axes in another order, needs new groups, too.

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

    def _made_by_all(self, spec: MeshSpec) -> DeviceMesh:
        return DeviceMesh(self.device_type, spec)

    def _from_torch(self, mesh: Any) -> DeviceMesh:
        return DeviceMesh.from_torch(mesh)

    def _part_in_torch(self) -> Any:
        """The part of torch's mesh on these ranks, if the root came from torch's mesh."""
        whole, names = self._flat_of or self, self.mesh_dim_names
        part = torch_part(self._root._torch, whole.mesh_dim_names)
        if part is None or names is None or whole is self:
            return part
        try:
            return part._flatten(names[0])  # the first time collective over all ranks
        except ValueError:  # torch's root mesh has an axis of that name
            return None

    @property
    def _is_current_rank_part_of_mesh(self) -> NoReturn:
        """Raises TypeError: torch.distributed.tensor, which asks this first, cannot use it."""
        raise TypeError(f"{self!r} is {_OURS}")

    def __bool__(self) -> bool:
        refuse_torch_caller(self, _OURS)
        return True

    def __len__(self) -> NoReturn:
        refuse_torch_caller(self, _OURS)  # which would read it as ranks
        raise TypeError(f"{self!r} has no len(): size() is the number of its ranks")

    _layout = _rank_map = _get_root_mesh = _is_current_rank_part_of_mesh
    _get_or_create_default_group = _is_current_rank_part_of_mesh

    def _link(self, mesh: Any) -> None:
        if self._torch is None:
            self._torch = mesh
        mesh._tilework_mesh = self

    # -- Python's own ------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:
        current_world().state(MeshesOfRank).entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        current_world().state(MeshesOfRank).entered.pop()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self.device_type == other.device_type and self.spec == other.spec

    def __hash__(self) -> int:
        return hash((self.device_type, self.spec))

    def __copy__(self) -> DeviceMesh:
        return self  # the groups have one owner

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        spec = self.spec
        return find_or_make, (self.device_type, spec.shape, spec.ranks, spec.names)


def find_or_make(
    device_type: str, shape: Sequence[int], ranks: Sequence[int], names: Sequence[str] | None
) -> DeviceMesh:
    """The mesh for unpickling: a mesh of this rank or part of one; else a new one, collectively."""
    spec = MeshSpec(tuple(shape), tuple(ranks), None if names is None else tuple(names))
    meshes = current_world().state(MeshesOfRank).known
    known: DeviceMesh | None = meshes.get((device_type, spec))
    if known is not None:
        return known
    whole: DeviceMesh
    for whole in list(meshes.values()):
        if spec.names and whole.device_type == device_type and whole.has_part(spec):
            return whole[spec.names]
    return DeviceMesh(device_type, spec)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Iterable[str] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """A mesh of all ranks, in their order. Collective over all ranks; blocks.

    Args:
        mesh_shape: The number of ranks along each axis; their product is the number of ranks.
        backend_override: As for :class:`DeviceMesh`.

    Raises:
        RuntimeError: The job has another number of ranks than the shape.
        ValueError: An axis would have no ranks.
        TypeError: The shape is one number, or has something else than numbers.

    Example: see docs/concepts/meshes.md.
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
            f"a mesh of shape {tuple(mesh_shape)} needs {spec.size} ranks, and there "
            f"{ranks_there(spec.size)}"
        )
    return DeviceMesh(device_type, spec, backend_override=backend_override)


def mesh_or_current(mesh: Any) -> DeviceMesh:
    """``mesh``, also of torch, as a DeviceMesh; for None, that of the innermost ``with mesh:``."""
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, DeviceMesh):
        return mesh
    if is_torch_mesh(mesh):
        return DeviceMesh.from_torch(mesh)
    hint = "; placements come after the mesh" if isinstance(mesh, (list, tuple)) else ""
    raise TypeError(
        f"mesh must be a DeviceMesh, as init_device_mesh() makes, got {type(mesh).__name__}{hint}"
    )


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block on this rank.

    Raises:
        RuntimeError: No mesh is active.

    Example: see docs/concepts/meshes.md.
    """
    entered: list[DeviceMesh] = current_world().state(MeshesOfRank).entered
    if not entered:
        raise RuntimeError(
            "No device mesh is currently active: pass one, or use `with mesh:`. "
            'init_device_mesh("cpu", (n,)) makes one of n ranks'
        )
    return entered[-1]
