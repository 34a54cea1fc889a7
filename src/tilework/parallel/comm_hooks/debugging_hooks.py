"""Hooks that record communication, or leave it out to show what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tilework.parallel.comm_hooks.bucket import CommHook, GradBucket
from tilework.parallel.comm_hooks.default_hooks import BucketFuture


def noop_hook(_: Any, bucket: GradBucket) -> BucketFuture:
    """Reduce nothing: each rank keeps its own gradients. Shows a step's time without communication.

    Local.
    """
    future: BucketFuture = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@dataclass(frozen=True)
class BucketRecord:
    """The record that :func:`recording_hook` makes of a bucket just before the reduction.

    Attributes:
        index: The bucket's place in the order of reduction.
        size_bytes: The bytes of the bucket's gradients.
        shapes: The shapes of the bucket's gradients.
        norm: The Euclidean norm of this rank's gradients before reduction.
        is_finite: False if an element of this rank's gradients was infinite or not a number.
    """

    index: int
    size_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    norm: float
    is_finite: bool


@dataclass
class RecordState:
    """The state of :func:`recording_hook`.

    Attributes:
        hook: Does the reduction.
        state: The state of ``hook``.
        records: Records of reductions, oldest first.
        on_record: Called with each record; None: nothing is called.
    """

    hook: CommHook
    state: Any = None
    records: list[BucketRecord] = field(default_factory=list)
    on_record: Callable[[BucketRecord], None] | None = None


def recording_hook(state: RecordState, bucket: GradBucket) -> BucketFuture:
    """Record a bucket's sizes and norm on this rank, then reduce it by another hook."""
    buffer = bucket.buffer()
    norm = float(torch.linalg.vector_norm(buffer))
    shapes = tuple(tuple(gradient.shape) for gradient in bucket.gradients())
    finite = bool(torch.isfinite(buffer).all())
    record = BucketRecord(bucket.index(), buffer.nbytes, shapes, norm, finite)
    state.records.append(record)
    if state.on_record is not None:
        state.on_record(record)
    return state.hook(state.state, bucket)
