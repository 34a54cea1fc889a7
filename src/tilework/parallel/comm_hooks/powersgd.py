"""PowerSGD: gradients of matrices sent as products of two thin matrices.

T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization*, NeurIPS 2019. A matrix M of n x m becomes P Q' with P of n x r and Q of
m x r, found by one step of subspace iteration: P = M Q is averaged and orthogonalised, then
Q = M' P is averaged. Both are linear in M: the result is the same as for the average of all M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, ReduceOp, Work
from tilework.comm.operations.internal import all_reduce
from tilework.comm.per_call.internal import refuse_count
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.bucket import DeferredFuture, GradBucket
from tilework.parallel.comm_hooks.hooks import BucketFuture, allreduce_hook, group_or_default


@dataclass(frozen=True)
class CompressionStats:
    """Bytes that PowerSGD has sent so far on this rank.

    Attributes:
        rate: Bytes of gradients for each byte sent.
        bytes_before: Bytes of all gradients that were compressed or sent as they are.
        bytes_after: Bytes sent in their place.
    """

    rate: float
    bytes_before: int
    bytes_after: int


class PowerSGDState:
    """Settings and memory of the PowerSGD hooks, one for each DistributedDataParallel module.

    Args:
        process_group: The group; None: the default group.
        matrix_approximation_rank: The number r of columns of P and Q.
        start_powerSGD_iter: The number of steps before compression begins; these average gradients
            in full. At least 2 with error feedback or warm start: buckets are rebuilt after the
            first step.
        min_compression_rate: A matrix of n x m is compressed if (n + m) r times this is less than
            n m.
        use_error_feedback: Add the part of a gradient that compression lost to the next gradient.
        warm_start: Start from the Q (and P) of the last step, not from random matrices.
        orthogonalization_epsilon: Added to norms; 0: columns without a direction become zero.
        random_seed: For the first Q; the same on all ranks.
        compression_stats_logging_frequency: Accepted for torch's sake: ask compression_stats().
        batch_tensors_with_same_shape: Multiply matrices of one shape together.

    Raises:
        ValueError: Settings are out of range or contradict each other.
    """

    def __init__(
        self,
        process_group: AnyGroup,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is "
                "enabled, because PowerSGD can only be applied after the first two iterations in "
                "DDP."
            )
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank is the number of columns of P and Q, at least 1; got "
                f"{matrix_approximation_rank}"
            )
        if min_compression_rate <= 0:
            raise ValueError(f"min_compression_rate must be positive, got {min_compression_rate}")
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.generator = torch.Generator().manual_seed(random_seed)
        #: By bucket: the part of the last gradients that compression lost.
        self.error_dict: dict[int, Tensor] = {}
        #: By bucket and number of the matrix: the last P and Q.
        self.p_memory_dict: dict[tuple[int, int], Tensor] = {}
        self.q_memory_dict: dict[tuple[int, int], Tensor] = {}
        self.iter = 0
        self.bytes_before = self.bytes_after = 0

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__, process_group=None)
        state["generator"] = self.generator.get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])

    def compression_stats(self) -> CompressionStats:
        """The bytes saved since the first compressed step. Local."""
        rate = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        return CompressionStats(rate, self.bytes_before, self.bytes_after)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket with compressed matrices, each separately. Collective.

    Gradients of two or more dims count as matrices of first dim x the rest. A gradient that is not
    a matrix, or is too small to gain, is averaged without compression.
    """
    gradients = bucket.gradients()
    parts = torch.split(bucket.buffer(), [gradient.numel() for gradient in gradients])
    matrices = [  # views: reshape would copy a gradient in channels_last
        (number, gradient if gradient.ndim == 2 else part.view(gradient.shape[0], -1))
        for number, (gradient, part) in enumerate(zip(gradients, parts, strict=True))
        if gradient.ndim > 1
    ]
    return _hook(state, bucket, matrices)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket compressed as one square matrix: faster, less precise. Collective."""
    buffer = bucket.buffer()
    side = max(1, int(buffer.numel() ** 0.5))
    side += side * side < buffer.numel()
    padded = torch.nn.functional.pad(buffer, (0, side * side - buffer.numel()))
    return _hook(state, bucket, [(-1, padded.view(side, side))])


@dataclass(eq=False)
class _Matrix:
    """A gradient matrix M under compression, with the thin matrices P and Q that are sent."""

    #: The indices of the bucket and of the gradient in the bucket; -1: the whole bucket.
    key: tuple[int, int]
    matrix: Tensor
    #: Of n x r. Undefined at first; then M Q of this rank, then the average, orthonormalised.
    p: Tensor
    #: Of m x r. Orthonormal and the same on all ranks; then M' P of this rank, then the average.
    q: Tensor


def _hook(
    state: PowerSGDState, bucket: GradBucket, matrices: Sequence[tuple[int, Tensor]]
) -> BucketFuture:
    refuse_count("powerSGD_hook")
    is_compressed = state.iter >= state.start_powerSGD_iter
    state.iter += bucket.is_last()
    if not is_compressed:
        return allreduce_hook(state.process_group, bucket)
    group = group_or_default(state.process_group)
    buffer, index = bucket.buffer(), bucket.index()
    before = _with_error(state, bucket, matrices) if state.use_error_feedback else None
    compressed = [made for each in matrices if (made := _prepared(state, index, *each))]
    rest = _rest(bucket, compressed)
    state.bytes_before += buffer.nbytes
    sent = sum(m.p.nbytes + m.q.nbytes for m in compressed) + sum(t.nbytes for t in rest)
    state.bytes_after += sent
    for each in compressed:
        torch.mm(each.matrix, each.q, out=each.p)
    first = [*rest, *(each.p for each in compressed)]
    flat = torch.cat([tensor.reshape(-1) for tensor in first]) if first else None
    work = None if flat is None else all_reduce(flat, ReduceOp.AVG, group, async_op=True)

    def finish() -> Tensor:
        _unpack(work, flat, first)
        _second_phase(state, compressed, group)
        for each in compressed:
            torch.mm(each.p, each.q.t(), out=each.matrix)
            if each.key[1] == -1:
                buffer.copy_(each.matrix.reshape(-1)[: buffer.numel()])
        if before is not None:
            state.error_dict[index] = _left_out(bucket, before, buffer, compressed)
        return buffer

    return DeferredFuture(finish)


def _with_error(
    state: PowerSGDState, bucket: GradBucket, matrices: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """A copy of the bucket's gradients, after what the last compression lost was added to them."""
    buffer, error = bucket.buffer(), state.error_dict.get(bucket.index())
    if error is not None and error.shape == buffer.shape:
        buffer.add_(error)
        if matrices and matrices[0][0] == -1:
            matrices[0][1].view(-1)[: buffer.numel()].copy_(buffer)
    return buffer.clone()


def _prepared(state: PowerSGDState, index: int, number: int, matrix: Tensor) -> _Matrix | None:
    """Make P (empty) and Q (orthonormal) for a matrix; None if compression gains too little."""
    rows, columns = matrix.shape
    rank = min(rows, columns, state.matrix_approximation_rank)
    is_worth_it = (rows + columns) * rank * state.min_compression_rate < rows * columns
    if not is_worth_it and number != -1:
        return None
    key = index, number
    q = state.q_memory_dict.get(key) if state.warm_start else None
    if q is None or q.shape != (columns, rank) or q.dtype != matrix.dtype:
        drawn = torch.randn(columns, rank, generator=state.generator, dtype=matrix.dtype)
        q = drawn.to(matrix.device)
    orthogonalize(q, state.orthogonalization_epsilon)
    p = matrix.new_empty(rows, rank)
    if state.warm_start:
        state.p_memory_dict[key], state.q_memory_dict[key] = p, q
    return _Matrix(key, matrix, p, q)


def _rest(bucket: GradBucket, compressed: Sequence[_Matrix]) -> list[Tensor]:
    numbers = {each.key[1] for each in compressed}
    if -1 in numbers:
        return []
    return [g for number, g in enumerate(bucket.gradients()) if number not in numbers]


def _second_phase(state: PowerSGDState, compressed: Sequence[_Matrix], group: ProcessGroup) -> None:
    for each in compressed:
        orthogonalize(each.p, state.orthogonalization_epsilon)
        torch.mm(each.matrix.t(), each.p, out=each.q)
    if compressed:
        flat = torch.cat([each.q.reshape(-1) for each in compressed])
        all_reduce(flat, ReduceOp.AVG, group)
        _unpack(None, flat, [each.q for each in compressed])


def _unpack(work: Work | None, flat: Tensor | None, tensors: Sequence[Tensor]) -> None:
    if work is not None:
        work.wait()
    if flat is not None:
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _left_out(
    bucket: GradBucket, before: Tensor, after: Tensor, compressed: Sequence[_Matrix]
) -> Tensor:
    """The error of compression: ``before`` minus ``after``, in the memory of ``before``."""
    error = before.sub_(after)
    numbers = {each.key[1] for each in compressed}
    if -1 not in numbers:
        parts = torch.split(error, [gradient.numel() for gradient in bucket.gradients()])
        for number, part in enumerate(parts):
            if number not in numbers:
                part.zero_()
    return error


def orthogonalize(matrix: Tensor, epsilon: float = 0) -> None:
    """Make the columns of a matrix of n x r, with r small, orthonormal, in place. Local.

    Modified Gram-Schmidt in double precision, with ``epsilon`` added to each column's norm. A
    column that depends on those before it, as in a matrix of zeros, becomes zero, and stays out of
    the approximation.
    """
    columns = matrix.to(torch.float64)
    limits = (torch.finfo(matrix.dtype).eps * columns.norm(dim=0)).tolist()
    for at, limit in enumerate(limits):
        column = columns[:, at]
        for before in range(at):
            column -= torch.dot(columns[:, before], column) * columns[:, before]
        norm = float(column.norm())
        if norm <= limit and epsilon == 0:
            column.zero_()
        else:
            column /= norm + epsilon
    matrix.copy_(columns)
