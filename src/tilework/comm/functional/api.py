"""Functional collectives: each returns a new tensor and leaves inputs unchanged.

Every function here is collective over ``group``, like the functions of
:mod:`tilework.comm.operations.collectives`. The backward pass of a result is collective, too: every
rank of the group must run it.

Results are asynchronous: large ones may still be in flight, and wait by themselves when they
are first used (:class:`~tilework.comm.functional.async_tensor.AsyncTensor`); small ones are plain
tensors. A failed operation raises when the result is used.

Gradients are those of the sum of all ranks' losses; ``requires_grad`` must agree between the
ranks. Under torch.compile, torch.export and make_fx each call becomes two operators,
``tilework::<name>`` and ``tilework::wait``.

``group`` is a group, its name, a mesh of one axis, a pair of a mesh and one of its axes, a list of
global ranks (the group is made when it is first named), or None for the default group. All raise
``ValueError`` or ``TypeError`` for arguments that are wrong by themselves, also on a rank outside
the group. torch's names of parameters (``self``, ``reduceOp``, ``tag=""``) are taken, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilework.comm.functional import kinds
from tilework.comm.functional import ops as _ops  # noqa: F401  # registers the operators
from tilework.comm.functional.async_tensor import AsyncTensor
from tilework.comm.functional.kinds import op_text
from tilework.comm.functional.running import GroupOrName, MeshLike, named, root_of, run, size_of
from tilework.comm.per_call.torch_names import torch_names
from tilework.comm.reduce_op import AnyReduceOp
from tilework.comm.world import AnyGroup

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_gather_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "copy_to_group",
    "exscan",
    "gather",
    "gather_from_group",
    "permute_tensor",
    "reduce",
    "reduce_from_group",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scan",
    "scatter",
    "scatter_to_group",
    "wait_tensor",
]

#: The ``group`` of functional collectives.
Group = AnyGroup | str | MeshLike | tuple[MeshLike, int | str] | Sequence[int]
#: The ``op`` of functional collectives: a ReduceOp, or the name of a reduction ("sum").
Op = AnyReduceOp | str


def wait_tensor(tensor: Tensor) -> Tensor:
    """The result of a functional collective as a plain tensor; waits for it if necessary.

    Correct results never need this call: it only chooses the place of the wait. Other tensors are
    returned unchanged.

    Raises:
        DistBackendError: The operation failed (the error's subclass says how).

    Example:
        >>> import torch
        >>> wait_tensor(torch.ones(1))
        tensor([1.])
    """
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor


@torch_names({"tag": ""}, self="tensor", reduceOp="op")
def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None) -> Tensor:
    """All ranks' ``tensor`` combined, the same bits on every rank.

    Backward: ``all_reduce`` of the gradients, scaled or selected as ``op`` asks. MIN and MAX
    give the gradient to the ranks that hold the extremum, in equal shares; those two and
    PRODUCT communicate once or twice more. Bitwise operations have no gradient.

    Args:
        tensor: The same shape and dtype on every rank.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0], requires_grad=True)
        ...     (all_reduce(x) * 10).sum().backward()
        ...     return x.grad.item()
        >>> run_ranks(2, program)
        [20.0, 20.0]
    """
    return run(kinds.AllReduce, tensor, named(group), op_text(op))


def scan(tensor: Tensor, op: Op = "sum", group: Group = None, reverse: bool = False) -> Tensor:
    """The ``tensor`` of the ranks up to this one combined, like MPI_Scan.

    Backward: the reversed scan of the gradients, for ``sum`` and ``premul_sum``; other reductions
    raise NotImplementedError in backward.

    Args:
        tensor: The same shape and dtype on every rank.
        op: The reduction, but ``avg``. Contributions are combined in rank order.
        reverse: Combine the ranks from this one on.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0], requires_grad=True)
        ...     y = scan(x)
        ...     y.sum().backward()  # x has a part in the results of this rank and of those after it
        ...     return y.item(), x.grad.item()
        >>> run_ranks(3, program)
        [(1.0, 3.0), (3.0, 2.0), (6.0, 1.0)]
    """
    return run(kinds.Scan, tensor, named(group), op_text(op), reverse)


def exscan(tensor: Tensor, op: Op = "sum", group: Group = None, reverse: bool = False) -> Tensor:
    """:func:`scan` without this rank's own ``tensor``, like MPI_Exscan.

    On the rank that has no rank before it the result is the reduction of nothing: 0 for ``sum``,
    1 for ``product``, the largest number for ``min``.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(3, lambda rank: exscan(torch.tensor([rank + 1.0])).item())
        [0.0, 1.0, 3.0]
    """
    return run(kinds.Exscan, tensor, named(group), op_text(op), reverse)


def reduce(tensor: Tensor, dst: int, op: Op = "sum", group: Group = None) -> Tensor:
    """All ranks' ``tensor`` combined on rank ``dst``; zeros on the others.

    Backward: the gradient of ``dst``'s result, broadcast.

    Args:
        tensor: The same shape and dtype on every rank.
        dst: The root's global rank.
        op: The reduction. Contributions are combined in rank order.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: reduce(torch.tensor([rank + 1.0]), dst=1).item())
        [0.0, 3.0]
    """
    where = named(group)
    return run(kinds.Reduce, tensor, where, op_text(op), root_of(where, dst))


@torch_names({"tag": ""}, self="tensor")
def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Rank ``src``'s ``tensor`` on every rank.

    Backward: the sum of all ranks' gradients on ``src``, zeros on the others.

    Args:
        tensor: The same shape and dtype on every rank; the values count on ``src`` only.
        src: The root's global rank.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: broadcast(torch.tensor([float(rank)]), src=1).item())
        [1.0, 1.0]
    """
    where = named(group)
    return run(kinds.Broadcast, tensor, where, root_of(where, src))


@torch_names({"tag": ""}, self="tensor")
def all_gather_tensor(
    tensor: Tensor, gather_dim: int = 0, group: Group = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' ``tensor`` concatenated along ``gather_dim``, on every rank.

    Backward: ``reduce_scatter_tensor`` of the gradients.

    Args:
        tensor: The same shape on every rank, except in ``gather_dim`` if ``sizes`` are given. A
            scalar counts as one row.
        gather_dim: May be negative. The result is contiguous if it is 0, else a transposed
            view.
        sizes: The size of ``gather_dim`` on each rank, the same list on every rank; None: the
            size on this rank.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: all_gather_tensor(torch.tensor([rank])).tolist())
        [[0, 1], [0, 1]]
    """
    return _gathered(kinds.AllGather, tensor, gather_dim, named(group), sizes)


@torch_names({"tag": ""}, self="tensor", reduceOp="op")
def reduce_scatter_tensor(
    tensor: Tensor,
    op: Op = "sum",
    scatter_dim: int = 0,
    group: Group = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """All ranks' ``tensor`` combined; each rank gets its part along ``scatter_dim``.

    Backward: ``all_gather_tensor`` of the gradients, scaled or selected as ``op`` asks.

    Args:
        tensor: The same shape and dtype on every rank.
        op: The reduction. Contributions are combined in rank order.
        scatter_dim: May be negative.
        sizes: The size of each rank's part of ``scatter_dim``, the same list on every rank; None:
            equal parts.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: reduce_scatter_tensor(torch.tensor([1, 10])).item())
        [2, 20]
    """
    where = named(group)
    dim = _dim(tensor, scatter_dim)
    rows = _shares(tensor, dim, size_of(where), sizes)
    return run(kinds.ReduceScatter, tensor, where, op_text(op), dim, rows)


@torch_names({"tag": ""}, self="tensor")
def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """The parts that all ranks send to this rank: part r of the result comes from rank r.

    Backward: the same with both splits exchanged.

    Args:
        tensor: The tensor whose rows (dim 0) are divided among the ranks.
        output_split_sizes: Rows received from each rank; None: equal parts.
        input_split_sizes: Rows sent to each rank; None: equal parts.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: all_to_all_single(torch.arange(2) + 10 * rank).tolist())
        [[0, 10], [1, 11]]
    """
    if isinstance(output_split_sizes, Tensor):
        raise TypeError(
            "all_to_all_single takes the tensor to send, then the sizes, and returns what came; "
            "torch.distributed.nn.functional's, which takes a tensor to fill first, is "
            "tilework.distributed.nn.functional.all_to_all_single"
        )
    where = named(group)
    dim = _dim(tensor, 0)
    sent = _shares(tensor, dim, size_of(where), input_split_sizes)
    received = sent if output_split_sizes is None else list(output_split_sizes)
    if output_split_sizes is None and input_split_sizes is not None:
        received = _shares(tensor, dim, size_of(where), None)
    return run(kinds.AllToAll, tensor, where, received, sent)


def gather(
    tensor: Tensor,
    dst: int,
    gather_dim: int = 0,
    group: Group = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """:func:`all_gather_tensor` for rank ``dst`` only; a result without rows on the others.

    Backward: ``scatter`` of ``dst``'s gradient.

    Args:
        tensor: As for :func:`all_gather_tensor`.
        dst: The root's global rank.
        gather_dim: May be negative.
        sizes: As for :func:`all_gather_tensor`.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: gather(torch.tensor([rank]), dst=1).tolist())
        [[], [0, 1]]
    """
    where = named(group)
    return _gathered(kinds.Gather, tensor, gather_dim, where, sizes, root_of(where, dst))


def scatter(
    tensor: Tensor, src: int, sizes: Sequence[int], scatter_dim: int = 0, group: Group = None
) -> Tensor:
    """This rank's part of rank ``src``'s ``tensor`` along ``scatter_dim``.

    Backward: ``gather`` of all ranks' gradients to ``src``.

    Args:
        tensor: The tensor to divide, on ``src``. On other ranks only the dtype and the other dims
            count: pass a tensor without rows.
        src: The root's global rank.
        sizes: The size of each rank's part of ``scatter_dim``, the same list on every rank.
        scatter_dim: May be negative.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     whole = torch.arange(3) if rank == 0 else torch.empty(0, dtype=torch.int64)
        ...     return scatter(whole, src=0, sizes=[1, 2]).tolist()
        >>> run_ranks(2, program)
        [[0], [1, 2]]
    """
    where = named(group)
    dim = _dim(tensor, scatter_dim)
    return run(kinds.Scatter, tensor, where, root_of(where, src), dim, list(sizes))


@torch_names({"tag": ""}, self="tensor")
def permute_tensor(tensor: Tensor, src_dst: Sequence[int], group: Group = None) -> Tensor:
    """The ``tensor`` of the rank that sends to this rank; zeros if no rank does.

    Backward: the inverse permutation of the gradients.

    Args:
        tensor: The same shape and dtype on every rank.
        src_dst: ``src_dst[r]`` is the destination of group rank r, or -1 for none; the same list on
            every rank, no destination twice.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(3, lambda rank: permute_tensor(torch.tensor(rank), [1, 2, -1]).item())
        [0, 0, 1]
    """
    where = named(group)
    _check_permutation(src_dst, size_of(where))
    return run(kinds.Permute, tensor, where, list(src_dst))


# -- several tensors -------------------------------------------------------------------------


@torch_names({"tag": ""}, self="tensors", reduceOp="op")
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = "sum", group: Group = None
) -> list[Tensor]:
    """:func:`all_reduce` of each tensor; all start before the first wait.

    Example: ``y, z = all_reduce_coalesced([x, w])``; see :func:`all_reduce`.
    """
    return [all_reduce(tensor, op, group) for tensor in tensors]


@torch_names({"tag": ""}, self="tensors")
def all_gather_into_tensor_coalesced(
    tensors: Sequence[Tensor], group: Group = None
) -> list[Tensor]:
    """:func:`all_gather_tensor` of each tensor; all start before the first wait.

    Example: as for :func:`all_gather_tensor`, with a list of tensors.
    """
    return [all_gather_tensor(tensor, 0, group) for tensor in tensors]


@torch_names({"tag": ""}, inputs="tensors", reduceOp="op")
def reduce_scatter_tensor_coalesced(
    tensors: Sequence[Tensor], op: Op, scatter_dim: Sequence[int], group: Group = None
) -> list[Tensor]:
    """:func:`reduce_scatter_tensor` of each tensor, with a dim for each.

    Example: ``reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0])``.
    """
    if len(tensors) != len(scatter_dim):
        raise ValueError(
            f"scatter_dim must have one number for each of {len(tensors)} tensors, got "
            f"{list(scatter_dim)}"
        )
    pairs = zip(tensors, scatter_dim, strict=True)
    return [reduce_scatter_tensor(tensor, op, dim, group) for tensor, dim in pairs]


# -- one value and one loss that all ranks hold -------------------------------------------------


def copy_to_group(tensor: Tensor, group: Group = None) -> Tensor:
    """``tensor`` itself, a value that is equal on all ranks, before ranks use it in different ways.

    Forward: a view, nothing is sent. Backward: the sum of all ranks' gradients. If
    :func:`reduce_from_group` ends the part in which ranks differ, gradients are those of *one* loss
    that is equal on all ranks (docs/decisions/0006).

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.ones(1, requires_grad=True)  # the same on both ranks
        ...     loss = reduce_from_group(copy_to_group(x) * (rank + 1))  # x + 2 x
        ...     loss.sum().backward()
        ...     return x.grad.item()
        >>> run_ranks(2, program)
        [3.0, 3.0]
    """
    return run(kinds.CopyToGroup, tensor, named(group))


def reduce_from_group(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum of all ranks' ``tensor``, which all ranks hold and use in the same way from here on.

    Forward: ``all_reduce``. Backward: nothing, the gradient passes unchanged. See
    :func:`copy_to_group`.

    Example: see :func:`copy_to_group`.
    """
    return run(kinds.ReduceFromGroup, tensor, named(group))


def scatter_to_group(
    tensor: Tensor, dim: int = 0, group: Group = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of ``tensor``, a value that is equal on all ranks.

    Forward: nothing moves. Backward: ``all_gather_tensor`` of the gradients. See
    :func:`copy_to_group`.

    Args:
        tensor: The same on every rank.
        dim: The dim that is divided; may be negative.
        sizes: The size of each rank's part of ``dim``; None: equal parts.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: scatter_to_group(torch.arange(4)).tolist())
        [[0, 1], [2, 3]]
    """
    where = named(group)
    dim = _dim(tensor, dim)
    return run(
        kinds.ScatterToGroup, tensor, where, dim, _shares(tensor, dim, size_of(where), sizes)
    )


def gather_from_group(
    tensor: Tensor, dim: int = 0, group: Group = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' ``tensor`` concatenated, which all ranks use in the same way from here on.

    Forward: ``all_gather_tensor``. Backward: this rank's part of the gradient, locally. See
    :func:`copy_to_group`.

    Args:
        tensor: As for :func:`all_gather_tensor`.
        dim: May be negative.
        sizes: As for :func:`all_gather_tensor`.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> run_ranks(2, lambda rank: gather_from_group(torch.tensor([rank])).tolist())
        [[0, 1], [0, 1]]
    """
    return _gathered(kinds.GatherFromGroup, tensor, dim, named(group), sizes)


# -- arguments -------------------------------------------------------------------------------


def _gathered(
    kind: type[kinds.AllGather] | type[kinds.Gather],
    tensor: Tensor,
    dim: int,
    group: GroupOrName,
    sizes: Sequence[int] | None,
    *root: int,
) -> Tensor:
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    dim = _dim(tensor, dim)
    rows = [tensor.shape[dim]] * size_of(group) if sizes is None else list(sizes)
    return run(kind, tensor, group, *root, dim, rows)


def _dim(tensor: Tensor, dim: int) -> int:
    count = tensor.dim()
    if not -count <= dim < count:
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {list(tensor.shape)}")
    return dim % count


def _shares(tensor: Tensor, dim: int, size: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    rows = tensor.shape[dim]
    if rows % size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {list(tensor.shape)} does not divide equally among "
            f"{size} ranks; give the size for each rank"
        )
    return [rows // size] * size


def _check_permutation(destinations: Sequence[int], size: int) -> None:
    taken = sorted(d for d in destinations if d != -1)
    if (
        len(destinations) != size
        or len(set(taken)) != len(taken)
        or (taken and not 0 <= taken[0] <= taken[-1] < size)
    ):
        raise ValueError(
            f"src_dst must give each of the {size} ranks a different destination (0 to "
            f"{size - 1}) or -1, got {list(destinations)}"
        )
