"""Functions under torch's names: counts of collectives, pictures, boxes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

from torch import Tensor

from tilework.comm.contract import Kind
from tilework.comm.per_call.internal import listening
from tilework.dtensor.debug.causes import EventLog, explain
from tilework.dtensor.show import show
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor
from tilework.layout import Box, Placement, Replicate
from tilework.layout.internal import native_placement, placements_in, whole_numbers
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current

#: The collectives of a group by their names without underscores: torch has several of each.
_KINDS: dict[str, str] = {kind.replace("_", ""): kind for kind in get_args(Kind)}
#: What torch's names have after that.
_FORMS = re.compile("(intotensor|tensor|single|base|coalesced)+$")
_SHAPE = "a shape has a size for each dim, as (4, 3)"


def _kind(key: object) -> str:
    """The collective that ``key`` names: by name, or by an operator of torch's collectives."""
    name = str(getattr(key, "__name__", key)).partition(".")[0]
    return _KINDS.get(_FORMS.sub("", name.replace("_", "")), name)


class CommCounts(Counter[str]):
    """The number of collectives of each name.

    An operator of torch's collectives can be the key in place of a name, also in a dict that is
    compared with the counts.

    Example:
        >>> import torch
        >>> CommCounts(["all_gather"]) == {torch.ops._c10d_functional.all_gather_into_tensor: 1}
        True
    """

    def __missing__(self, key: object) -> int:
        return self.get(_kind(key), 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        counts: Counter[str] = Counter()
        for key, number in other.items():
            counts[_kind(key)] += number
        return Counter(dict(self)) == counts

    def __ne__(self, other: object) -> bool:
        return not self == other


class CommDebugMode:
    """Count the collectives of groups that this rank runs inside the ``with`` block.

    Local. Not counted are those by which ranks only compare or agree. :func:`explain` lists those
    of DTensors, with the causes.

    Example:
        >>> import torch
        >>> from tilework.dtensor import CommDebugMode, Shard, distribute_tensor, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        ...     with CommDebugMode() as comm:
        ...         x.full_tensor()
        ...     return comm.get_total_counts(), comm.get_comm_counts()["all_gather"]
        >>> run_ranks(2, program)[0]
        (1, 1)
    """

    def __init__(self) -> None:
        #: The collectives of DTensors, with their causes.
        self.log = EventLog()
        self._kinds: list[str] = []
        self._open = ExitStack()

    def __enter__(self) -> CommDebugMode:
        """Begin to count, from zero."""
        self._kinds = []
        self._open = ExitStack()
        self.log = self._open.enter_context(explain())
        self._open.enter_context(listening(self._kinds.append))
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; the counts stay readable."""
        self._open.close()

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self._kinds)

    def get_comm_counts(self) -> CommCounts:
        """The number of each kind of collective; 0 for a kind that did not run."""
        return CommCounts(self._kinds)

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The counts, and a table of DTensors' collectives: operator, layouts, bytes, place in the
        program.

        Args:
            noise_level: Accepted for compatibility with torch, and ignored: there is one table.
        """
        counts = ", ".join(f"{kind} {count}" for kind, count in self.get_comm_counts().items())
        return f"collectives of groups: {counts or 'none'}\nof DTensors: {self.log}"

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self.generate_comm_debug_tracing_table(noise_level))


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which part, on the mesh's first rank; see :func:`show`. Local.

    Args:
        dtensor: The tensor.
        header: A line to print before the picture.
        use_rich: Accepted for compatibility with torch, and ignored: rich always draws.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.dtensor import visualize_sharding
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     visualize_sharding(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]), "weight")
        >>> _ = run_ranks(2, program)
        weight
        DTensor f32[8@tp, 4] on cpu mesh tp=2
        ...
    """
    if isinstance(dtensor, DTensor) and not dtensor.device_mesh.is_first:
        return
    if header:
        print(header)
    show(dtensor)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Do nothing: plain tensors beside DTensors always count as replicated, and are compared.

    Example:
        >>> with implicit_replication():
        ...     pass
    """
    yield


def local_box(
    shape: Sequence[int],
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    order: Sequence[int] | None = None,
    rank: int | None = None,
) -> Box:
    """The part that a rank holds of a tensor with this shape and layout. Local; makes no tensor.

    A rank has several parts where blocks are dealt in turns; :meth:`DTensor.local_boxes` lists all.

    Args:
        shape: The global shape.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        placements: The placement along each axis; None: replicated.
        order: The axes in the order in which they shard; None: from the first to the last.
        rank: A global rank of the mesh; None: this rank.

    Raises:
        ValueError: The placements do not fit, they deal blocks in turns, or the rank is not in the
            mesh.

    Example:
        >>> from tilework.dtensor import Shard, init_device_mesh, local_box
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     box = local_box((3, 4), mesh, [Shard(0)])
        ...     return box.offsets, box.sizes
        >>> run_ranks(2, program)
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    spec = _spec(shape, device_mesh, placements, order)
    mesh = spec.mesh
    where = mesh.get_rank() if rank is None else rank
    coordinate = mesh.spec.coordinate(where)
    if coordinate is None:
        raise ValueError(f"rank {where} is not in {mesh}, so it has no part of such a tensor")
    boxes = spec.boxes_at(coordinate)
    if len(boxes) > 1:
        raise ValueError(
            f"rank {where} has {len(boxes)} parts of such a tensor, not a single box, as "
            f"{list(spec.placements)} deal blocks in turns: ask a DTensor for its local_boxes()"
        )
    return boxes[0]


def _spec(
    shape: Sequence[int],
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    order: Sequence[int] | None,
) -> DTensorSpec:
    mesh = mesh_or_current(device_mesh)
    given = [None] * mesh.ndim if placements is None else placements_in(placements)
    native = [Replicate() if each is None else native_placement(each) for each in given]
    return spec_of(mesh, native, whole_numbers(shape, _SHAPE), order)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and the offsets of :func:`local_box`. Local.

    Example:
        >>> from tilework.dtensor import Shard, compute_local_shape_and_global_offset
        >>> from tilework.dtensor import init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return compute_local_shape_and_global_offset((3, 4), mesh, [Shard(0)])
        >>> run_ranks(2, program)[1]
        ((1, 4), (2, 0))
    """
    box = local_box(global_shape, mesh, placements)
    return box.sizes, box.offsets


def from_callback(
    shape: Sequence[int],
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    callback: Callable[[Box], Tensor],
    *,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor whose parts a function makes: each rank calls the function for one part only.

    Where blocks are dealt in turns, it calls the function for each of its blocks.

    Local, unless another axis replicates a sharded tensor (see :meth:`DTensor.from_local`). Useful
    if each rank reads a part of the data, such as rows of a file, and no rank has all of it.

    Args:
        shape: The global shape.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        placements: The placement along each axis; None: replicated.
        callback: Makes the elements of a box (``offsets``, ``sizes``, ``slices``), which may be
            empty, as a plain tensor of these sizes. All ranks that hold one box must get equal
            elements.
        order: The axes in the order in which they shard; None: from the first to the last.

    Raises:
        ValueError: The function's tensor has another shape; or as :func:`local_box`.
        TypeError: The function returned something else than a tensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, from_callback, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     rows = torch.arange(4)
        ...     x = from_callback((4,), mesh, [Shard(0)], lambda box: rows[box.slices])
        ...     return x.to_local().tolist()
        >>> run_ranks(2, program)
        [[0, 1], [2, 3]]
    """
    spec = _spec(shape, device_mesh, placements, order)
    if not spec.is_dealt:  # a rank outside of the mesh is refused
        boxes: Sequence[Box] = [local_box(shape, spec.mesh, placements, order=order)]
    else:
        boxes = spec.local_boxes
    parts = [_called(callback, box) for box in boxes]
    local = parts[0]
    if len(parts) > 1:
        local = parts[0].new_empty(spec.local_shape)
        for tile, part in zip(spec.tiles_of(local), parts, strict=True):
            tile.copy_(part)
    return DTensor.from_local(local, spec.mesh, placements, shape=shape, order=order)


def _called(callback: Callable[[Box], Tensor], box: Box) -> Tensor:
    local = callback(box)
    if not isinstance(local, Tensor):
        raise TypeError(f"callback is to make a tensor of box {box}, got {type(local).__name__}")
    if tuple(local.shape) != box.sizes:
        raise ValueError(
            f"callback is to make a tensor of shape {list(box.sizes)} for box {box}, got one of "
            f"{list(local.shape)}"
        )
    return local
