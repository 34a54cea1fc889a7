"""``run_plan``, which runs a plan, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call import checks
from tilework.comm.per_call.call_recorder import recorded
from tilework.comm.reduce_op import RedOpType, check_reduction, identity_element
from tilework.comm.transfer.large_buffers import empty_tensor
from tilework.comm.transfer.local_transfer import LocalTiles, LocalTransfer, moved_dtype
from tilework.comm.transfer.rounds import rounds_needed, run_in_rounds
from tilework.comm.transfer.run_mode import RunMode, agree_on_mode, refuse
from tilework.comm.transfer.single_collective import same_for_all, single_call
from tilework.comm.world import AnyGroup, member
from tilework.layout import Plan, Tiling

#: The default memory of a run besides source and target. Measured: with less memory, the meetings
#: of more rounds cost more than caches save, above all if ranks share cores; with more memory,
#: nothing is gained.
BUFFER_BYTES = 8 << 20


@recorded
def run_plan(
    plan: Plan,
    tiles: Sequence[Tensor],
    group: AnyGroup = None,
    *,
    out: Sequence[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[Tensor]:
    """This rank's tensors of the target tiling, moved and reduced as ``plan`` says.

    Collective over ``group``: every rank of the group calls, also ranks that hold nothing. Each
    rank passes a plan for this rank, from the same source to the same target. Blocks until this
    rank has the target tensors. A plan that moves nothing between ranks runs without communication.

    If the plan is recognised as one collective, and all ranks' memory fits it unchanged, that
    collective runs. Otherwise the plan runs in rounds of all_to_all (all_gather, if every rank gets
    the same elements). Terms of a partial source are combined in order, 16-bit floats in float32,
    so that every rank gets the same bits. A single all_reduce or reduce_scatter combines terms as
    the backend does.

    Memory: the results, and ``buffer_bytes``. torch's engines (gloo, nccl) also hold copies of the
    elements in flight in a round.

    Args:
        plan: This rank's plan, with global ranks.
        tiles: This rank's tensors of the source, one for each of ``plan.source.of(rank)``, of any
            strides. They stay unchanged.
        group: All ranks of the plan must be in it; ranks outside it get a warning and ``[]``.
        out: The tensors to write, one for each of ``plan.target.of(rank)``, of any strides
            (views of a larger tensor, say) that share no memory with ``tiles``; None: new,
            contiguous tensors.
        dtype: For a rank without tiles and ``out``: the dtype of the other ranks' tensors.
        device: For a rank without tiles and ``out``: the device; None means the CPU.
        buffer_bytes: The most memory for elements in flight. A round moves an element between any
            two ranks at least.

    Raises:
        ValueError: Tensors do not fit the plan or each other, the plan is another rank's, or a
            rank of the plan is not in the group; on every rank, and nothing has moved.
        CollectiveMismatchError: Ranks run different plans; on every rank, and nothing has moved.
        DistBackendError: As any collective.

    Example:
        >>> import torch
        >>> from tilework.layout import Shard, mesh_tiling, plan
        >>> from tilework.testing import run_ranks
        >>> rows, columns = (mesh_tiling((2, 4), [0, 1], [Shard(dim)]) for dim in (0, 1))
        >>> def program(rank):
        ...     row = torch.arange(4.0) + 10 * rank
        ...     return run_plan(plan(rows, columns, rank), [row.view(1, 4)])[0].tolist()
        >>> run_ranks(2, program)
        [[[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]]
    """
    pg = member(group, "run_plan")
    if pg is None:
        return []
    where = _device_of([*tiles, *(out or ())], device)
    try:
        _check_plan(plan, pg)
        tiles = checks.check_tensors(tiles, "tiles")
        out = None if out is None else checks.check_tensors(out, "out")
        used_dtype = _dtype_of([*tiles, *(out or ())], dtype)
        _check_tensors(plan.source, plan.rank, tiles, "tiles", used_dtype, where)
        if out is not None:
            _check_tensors(plan.target, plan.rank, out, "out", used_dtype, where)
            _check_writable(out)
        if plan.reduces:
            check_reduction(RedOpType(plan.source.reduce_op), used_dtype)
        identity = _identity(plan, used_dtype)
        boxes = plan.target.boxes_of(plan.rank)
        results = list(out or [empty_tensor(box.sizes, used_dtype, where) for box in boxes])
    except (ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
        # Wrong arguments, or no memory for the results.
        if isinstance(plan, Plan) and plan.collective.kind == "none":
            raise
        refuse(pg, error, where)
    # Count versions of written tensors; inference tensors have no versions.
    with torch.no_grad(), torch.inference_mode(any(result.is_inference() for result in results)):
        # Separate version counters: a collective may raise the version of an input.
        sources = [tile.data.resolve_conj().resolve_neg() for tile in tiles]
        viewed = used_dtype if plan.reduces else moved_dtype(used_dtype)
        source = LocalTiles(plan.source, plan.rank, sources, viewed)
        target = LocalTiles(plan.target, plan.rank, results, viewed)
        _run(LocalTransfer(pg, plan, source, target, used_dtype, where, identity), buffer_bytes)
    return results


def single_run(
    plan: Plan, tiles: Sequence[Tensor], out: Sequence[Tensor], group: ProcessGroup
) -> Callable[[], object] | None:
    """The call that runs a plan as one collective; None if this rank's tensors do not allow it.

    Local. All ranks may call it if all have one, of equal source, target and dtype, which
    :func:`run_plan` compares, but this does not.
    """
    if plan.reduces or plan.collective.kind == "none":
        return None
    dtype, where = out[0].dtype, out[0].device
    viewed = moved_dtype(dtype)
    sources = [tile.data.resolve_conj().resolve_neg() for tile in tiles]
    source = LocalTiles(plan.source, plan.rank, sources, viewed)
    target = LocalTiles(plan.target, plan.rank, out, viewed)
    local = LocalTransfer(group, plan, source, target, dtype, where, 0)
    return single_call(local) if _has_room(local, BUFFER_BYTES) else None


def _run(local: LocalTransfer, buffer_bytes: int) -> None:
    plan, pg = local.plan, local.pg
    rounds = rounds_needed(local, buffer_bytes)
    if plan.collective.kind == "none":
        _fill(local)
        run_in_rounds(local, RunMode(rounds, single_collective=False, same_for_all=False))
        return
    call = single_call(local) if _has_room(local, buffer_bytes) else None
    proposed = RunMode(
        rounds=rounds,
        single_collective=call is not None,
        same_for_all=pg.uneven_sizes and not plan.reduces and same_for_all(local.sends),
    )
    agreed = agree_on_mode(pg, plan, local.dtype, local.device, proposed)
    _fill(local)
    if agreed.single_collective and call is not None:
        call()
    else:
        run_in_rounds(local, agreed)


def _fill(local: LocalTransfer) -> None:
    """Write the reduction's identity to tiles of a partial target that no piece arrives for."""
    for tile in local.plan.fills:
        local.target.tensors[tile].view(local.dtype).fill_(local.identity)


def _identity(plan: Plan, dtype: torch.dtype) -> bool | int | float:
    """The element that :func:`_fill` writes; 0 if there is nothing to fill."""
    return identity_element(RedOpType(plan.target.reduce_op), dtype) if plan.fills else 0


def _has_room(local: LocalTransfer, buffer_bytes: int) -> bool:
    """True if a single collective copies at most ``buffer_bytes``, or the plan reduces."""
    if local.plan.reduces or not local.pg.holds_copies:
        return True
    size = local.dtype.itemsize
    return max(local.plan.bytes_sent(size), local.plan.bytes_received(size)) <= buffer_bytes


# -- checks of arguments ---------------------------------------------------------------------


def _check_plan(plan: Plan, pg: ProcessGroup) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a tilework.layout.Plan, got {type(plan)}")
    me = pg.global_ranks[pg.rank()]
    if plan.rank != me:
        raise ValueError(
            f"rank {me} was given a plan made for rank {plan.rank}: pass plan(…, rank={me})"
        )
    outside = {*plan.source.ranks, *plan.target.ranks}.difference(pg.global_ranks)
    if outside:
        raise ValueError(
            f"the plan has ranks {sorted(outside)}, which are not in group {pg.group_name!r} of "
            f"ranks {list(pg.global_ranks)}; run it in a group that has them all"
        )


def _dtype_of(tensors: Sequence[Tensor], given: torch.dtype | None) -> torch.dtype:
    dtype = tensors[0].dtype if tensors else given
    if dtype is None:
        raise ValueError(
            "a rank without tiles and out does not know the dtype of the others' tiles: pass dtype"
        )
    if given not in (None, dtype):
        raise ValueError(
            f"tensors are of {dtype}, but dtype={given} was given: leave dtype out, or convert the "
            f"tensors"
        )
    return dtype


def _device_of(tensors: Sequence[Tensor], given: torch.device | str | None) -> torch.device:
    if tensors and isinstance(tensors[0], Tensor):
        return tensors[0].device
    return torch.device(given or "cpu")


def _check_tensors(
    tiling: Tiling,
    rank: int,
    tensors: Sequence[Tensor],
    name: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    boxes = tiling.boxes_of(rank)
    if len(tensors) != len(boxes):
        raise ValueError(
            f"{name} must have one tensor for each of the {len(boxes)} tiles of rank {rank}, got "
            f"{len(tensors)}"
        )
    for i, (tensor, box) in enumerate(zip(tensors, boxes, strict=True)):
        if tuple(tensor.shape) != box.sizes:
            raise ValueError(
                f"{name}[{i}] holds {box} of rank {rank} and must have shape {list(box.sizes)}, "
                f"got {list(tensor.shape)}"
            )
        if (tensor.dtype, tensor.device) != (dtype, device):
            raise ValueError(
                f"{name}[{i}] is {tensor.dtype} on {tensor.device}, but others are {dtype} on "
                f"{device}: convert them to one dtype and device"
            )


def _check_writable(out: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(out):
        repeated = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if repeated or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"cannot write to out[{i}], of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}: elements share memory, or memory holds other numbers "
                f"(a lazy conj() or an imaginary part); pass a plain tensor"
            )
