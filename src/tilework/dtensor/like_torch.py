"""Functions under torch's names: counts of collectives, pictures, boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from tilework.dtensor.debug.causes import explain
from tilework.dtensor.debug.event_log import EventLog
from tilework.dtensor.show import show
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor
from tilework.layout import Box, Placement, Replicate
from tilework.layout.placements import native_placement, placements_in
from tilework.layout.whole_numbers import whole_numbers
from tilework.mesh import DeviceMesh
from tilework.mesh.making import mesh_or_current

#: torch's operators and this library's names of the same collectives.
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_SHAPE = "a shape has a size for each dim, as (4, 3)"


class CommCounts(Counter[str]):
    """The number of collectives of each name.

    An operator of torch's functional collectives can be the key in place of a name.
    """

    def __missing__(self, key: object) -> int:
        name = str(getattr(key, "__name__", key)).partition(".")[0]
        return self.get(_COLLECTIVES.get(name, name), 0)


class CommDebugMode:
    """Count the collectives that DTensors run on this rank inside the ``with`` block.

    Local. Collectives that the program calls directly are not counted. :func:`explain` lists the
    same collectives with their causes.

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
        #: The collectives themselves, with their causes.
        self.log = EventLog()
        self._open: AbstractContextManager[EventLog] | None = None

    def __enter__(self) -> CommDebugMode:
        """Begin to count, from zero."""
        self._open = explain()
        self.log = self._open.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; the counts stay readable."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(*error)

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self.log.events)

    def get_comm_counts(self) -> CommCounts:
        """The number of each kind of collective; 0 for a kind that did not run."""
        return CommCounts(event.collective for event in self.log.events)

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of the collectives: operator, layouts, bytes, place in the program.

        Args:
            noise_level: Accepted for compatibility with torch, and ignored: there is one table.
        """
        return str(self.log)

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

    Args:
        shape: The global shape.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        placements: The placement along each axis; None: replicated.
        order: The axes in the order in which they shard; None: from the first to the last.
        rank: A global rank of the mesh; None: this rank.

    Raises:
        ValueError: The placements do not fit, or the rank is not in the mesh.

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
    mesh = mesh_or_current(device_mesh)
    given = [None] * mesh.ndim if placements is None else placements_in(placements)
    spec = spec_of(
        mesh,
        [Replicate() if each is None else native_placement(each) for each in given],
        whole_numbers(shape, _SHAPE),
        order,
    )
    where = mesh.get_rank() if rank is None else rank
    coordinate = mesh.spec.coordinate(where)
    if coordinate is None:
        raise ValueError(f"rank {where} is not in {mesh}, so it has no part of such a tensor")
    return spec.box_at(coordinate)


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
    mesh = mesh_or_current(device_mesh)
    box = local_box(shape, mesh, placements, order=order)
    local = callback(box)
    if not isinstance(local, Tensor):
        raise TypeError(f"callback is to make a tensor of box {box}, got {type(local).__name__}")
    if tuple(local.shape) != box.sizes:
        raise ValueError(
            f"callback is to make a tensor of shape {list(box.sizes)} for box {box}, got one of "
            f"{list(local.shape)}"
        )
    return DTensor.from_local(local, mesh, placements, shape=shape, order=order)
