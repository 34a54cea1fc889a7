"""Operations as calls of torch's backend objects.

Data that is only moved goes as bytes, so every dtype can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.forms import Kind, Operation, Parts, op_factor
from tilework.comm.reduce_op import AnyReduceOp, RedOpType

#: torch's engines and their options; absent from builds of torch without them.
c10d: Any = getattr(torch._C, "_distributed_c10d", None)


def _all_bytes(parts: Parts) -> list[Tensor]:
    return [as_bytes(part) for part in parts]


def _barrier(backend: Any, operation: Operation, rank: int) -> Any:
    return backend.barrier(_options(c10d.BarrierOptions(), operation))


def _broadcast(backend: Any, operation: Operation, rank: int) -> Any:
    return backend.broadcast(
        _all_bytes(operation.outputs), _options(c10d.BroadcastOptions(), operation)
    )


def _all_reduce(backend: Any, operation: Operation, rank: int) -> Any:
    source, target = operation.inputs[0], operation.outputs[0]
    source = _scaled(source, operation)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return backend.allreduce([_number(target)], _options(c10d.AllreduceOptions(), operation))


def _reduce(backend: Any, operation: Operation, rank: int) -> Any:
    # torch's reduce leaves partial sums in the tensors of other ranks than the root.
    source, at_root = _scaled(operation.inputs[0], operation), rank == operation.root
    tensor = operation.outputs[0] if at_root else source.clone()
    if at_root and tensor.data_ptr() != source.data_ptr():
        tensor.copy_(source)
    return backend.reduce([_number(tensor)], _options(c10d.ReduceOptions(), operation))


def _all_gather(backend: Any, operation: Operation, rank: int) -> Any:
    source, outputs = as_bytes(operation.inputs[0]), operation.outputs
    options = _options(c10d.AllgatherOptions(), operation)
    if isinstance(outputs, Tensor):
        return backend._allgather_base(as_bytes(outputs), source, options)
    return backend.allgather([_all_bytes(outputs)], [source], options)


def _gather(backend: Any, operation: Operation, rank: int) -> Any:
    lists = [_all_bytes(operation.outputs)] if rank == operation.root else []
    options = _options(c10d.GatherOptions(), operation)
    return backend.gather(lists, [as_bytes(operation.inputs[0])], options)


def _scatter(backend: Any, operation: Operation, rank: int) -> Any:
    lists = [_all_bytes(operation.inputs)] if rank == operation.root else []
    options = _options(c10d.ScatterOptions(), operation)
    return backend.scatter([as_bytes(operation.outputs[0])], lists, options)


def _reduce_scatter(backend: Any, operation: Operation, rank: int) -> Any:
    target, inputs = _number(operation.outputs[0]), operation.inputs
    options = _options(c10d.ReduceScatterOptions(), operation)
    if isinstance(inputs, Tensor):
        return backend._reduce_scatter_base(target, _scaled(_number(inputs), operation), options)
    parts = [_scaled(_number(part), operation) for part in inputs]
    return backend.reduce_scatter([target], [parts], options)


def _all_to_all(backend: Any, operation: Operation, rank: int) -> Any:
    options = _options(c10d.AllToAllOptions(), operation)
    inputs, outputs = operation.inputs, operation.outputs
    if isinstance(inputs, Tensor) and isinstance(outputs, Tensor):
        source, target = as_bytes(inputs), as_bytes(outputs)
        source = source.clone() if source.data_ptr() == target.data_ptr() else source
        return backend.alltoall_base(target, source, [], [], options)
    # torch's call for lists wants equal sizes; the call with split sizes does not.
    sources, targets = _split(inputs, backend.size()), _split(outputs, backend.size())
    target = targets[0].new_empty(sum(part.numel() for part in targets))
    splits = [[part.numel() for part in parts] for parts in (targets, sources)]
    work = backend.alltoall_base(target, torch.cat(sources), *splits, options)
    return _Copied(work, targets, torch.split(target, splits[0]))


class _Copied:
    """torch's Work, and copies to make once it is done."""

    def __init__(self, work: Any, targets: list[Tensor], came: Sequence[Tensor]) -> None:
        self._work = work
        self._pairs = [*zip(targets, came, strict=True)]

    def wait(self, *limit: timedelta) -> None:
        self._work.wait(*limit)
        pairs, self._pairs = self._pairs, []
        for part, came in pairs:
            part.copy_(came)

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        if done:
            self.wait()
        return done


def _split(parts: Parts, size: int) -> list[Tensor]:
    if isinstance(parts, Tensor):
        return list(torch.tensor_split(as_bytes(parts), size))
    return _all_bytes(parts)


def _number(tensor: Tensor) -> Tensor:
    """``tensor`` as a flat tensor that torch's engines can reduce: booleans become bytes."""
    return as_bytes(tensor) if tensor.dtype is torch.bool else tensor.view(-1)


def _scaled(tensor: Tensor, operation: Operation) -> Tensor:
    """``tensor``, multiplied by the factor of a PREMUL_SUM, which NCCL forgets in groups of one."""
    scales = kind_of(operation.reduce_op) is RedOpType.PREMUL_SUM
    return tensor * op_factor(operation.reduce_op) if scales else tensor


CALLS: dict[Kind, Callable[[Any, Operation, int], Any]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _options(torch_options: Any, operation: Operation) -> Any:
    if hasattr(torch_options, "reduceOp"):
        torch_options.reduceOp = _torch_reduce_op(operation.reduce_op, operation.dtype)
    if hasattr(torch_options, "rootRank"):
        torch_options.rootRank = operation.root
    torch_options.timeout = timedelta(seconds=operation.timeout)
    return torch_options


def _torch_reduce_op(op: AnyReduceOp | None, dtype: torch.dtype | None) -> Any:
    kind = kind_of(op)
    if dtype is torch.bool:  # a sum of bytes would count them
        kind = OF_TRUTH.get(kind, kind)
    if kind is RedOpType.PREMUL_SUM:  # its terms are scaled already
        kind = RedOpType.SUM
    return getattr(c10d.ReduceOp, kind.name)


#: Reductions of booleans, as reductions of bytes.
OF_TRUTH = {RedOpType.SUM: RedOpType.MAX, RedOpType.PRODUCT: RedOpType.MIN}


def kind_of(op: AnyReduceOp | None) -> RedOpType:
    """The type of a reduction, without the factor of a PREMUL_SUM; SUM for None."""
    return op if isinstance(op, RedOpType) else RedOpType.SUM if op is None else op.type


def said_by(text: str) -> str:
    """The words of an engine's error that help a person, with a remedy for a known error."""
    said = text.strip().partition("\n")[0].rpartition("] ")[2]
    cause = re.search(r"Last error:\s*(\S.*)", text)  # NCCL's own words, at the end of torch's
    if cause is not None:
        said = f"{cause[1]} ({said})"
    if "Duplicate GPU" in text:
        said += (
            ". NCCL needs a GPU for each rank: start no more ranks than GPUs on a host, and call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first. Ranks can share a GPU "
            "with backend='cpu:shm,cuda:gloo'"
        )
    return said
