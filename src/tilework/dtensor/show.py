"""Pictures of DTensors on a terminal."""

from __future__ import annotations

from tilework.dtensor.debug.picture import layout_page
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import refuse_torch_dtensor


def show(tensor: DTensor) -> None:
    """Print a tensor's layout: a picture of which rank holds which part, and a table of the ranks.

    Local; one rank may call it alone. Without colours (in a pipe, or with NO_COLOR set) labels show
    who holds a part: with ``0, 1`` ranks 0 and 1 hold copies of the part, and with ``0+1`` they
    hold partial values, whose reduction is the part.

    Raises:
        TypeError: ``tensor`` is not a DTensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, show
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     if rank == 0:
        ...         show(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None))
        >>> _ = run_ranks(2, program)
        DTensor f32[8@tp, 4] on cpu mesh tp=2
        ...
    """
    refuse_torch_dtensor(tensor, "show()")
    if not isinstance(tensor, DTensor):
        raise TypeError(f"show() takes a DTensor, got {type(tensor).__name__}")
    layout_page(tensor).print()
