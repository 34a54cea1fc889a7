"""Tensors without dims in the place of sizes, dims, counts and other numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor import (
    DTensor,
    GatherWarning,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

FULL = torch.arange(36.0).sin().reshape(6, 6)


def t(number: float) -> Any:
    """A number, as far as types tell."""
    return torch.tensor(number)


def n(number: int) -> Any:
    """A number of numpy's."""
    return np.int64(number)


#: A dim of a reduction: torch 2.6 reads over a tensor there, and reduces all dims.
dim = t if torch.ones(2, 2).sum(t(0)).dim() else int

CALLS: dict[str, Callable[[Any], Tensor]] = {
    "view": lambda x: x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), -1),
    "view of a list": lambda x: x.view([t(3), 12]),
    "view, twice": lambda x: x.view(t(3), -1).view(t(2), -1),
    "a sharded number": lambda x: x.view((x > -9).sum() // 12, -1),
    "reshape": lambda x: x.reshape(4, t(9)),
    "expand": lambda x: x[None].expand(t(2), -1, -1),
    "repeat": lambda x: x.repeat(t(2), 1),
    "permute": lambda x: x.permute(t(1), t(0)),
    "transpose": lambda x: x.transpose(t(0), dim1=t(1)),
    "unsqueeze": lambda x: x.unsqueeze(dim=t(0)),
    "unsqueeze_": lambda x: (x * 1).unsqueeze_(t(0)),
    "unfold": lambda x: x.unfold(0, t(3), t(2)),
    "narrow": lambda x: x.narrow(t(0), t(1), t(2)),
    "sum": lambda x: x.sum(dim(0)),
    "maximum of two": lambda x: torch.max(x.mul(9).long(), t(0)),
    "topk": lambda x: x.topk(t(2))[0],
    "pad": lambda x: F.pad(x, (t(1), 0)),
    "cat": lambda x: torch.cat([x, x], t(0)),
    "gather": lambda x: x.gather(t(1), x.argsort(1)),
    "one_hot": lambda x: F.one_hot(x.argmax(1), t(6)),
    "norm": lambda x: x.norm(t(3.0)),
    "norm along a dim": lambda x: torch.linalg.vector_norm(x, t(1.5), dim=dim(0)),
    "norm of a sharded number": lambda x: x.norm(x.abs().sum()),
    "normalize": lambda x: F.normalize(x, 2.0, 1, t(0.5)),
    "leaky_relu": lambda x: F.leaky_relu(x, t(0.5)),
    "hardtanh": lambda x: F.hardtanh(x, max_val=t(0.5)),
    "quantile": lambda x: x.quantile(t(0.25)),
    "clamp": lambda x: x.clamp(t(-0.5), t(0.5)),
    "renorm": lambda x: x.renorm(t(2), t(0), t(0.5)),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1), label_smoothing=t(0.25)),
    "add": lambda x: x.add(x, alpha=t(0.5)),
    "huber_loss": lambda x: F.huber_loss(x, x * 2, delta=t(0.25)),
    "full_like": lambda x: torch.full_like(x, t(0.25)),
    "variance": lambda x: x.var(0, correction=t(0.5)),
    "numpy: a dim": lambda x: x.roll(2, n(0)),
    "numpy: a stride": lambda x: F.conv1d(x, torch.ones(1, 6, 2), stride=n(2)),
    "numpy: a list": lambda x: F.conv1d(x, torch.ones(1, 6, 2), padding=(n(1),)),
    "numpy: a size": lambda x: x.view(n(4), 9),
    "numpy: repeats": lambda x: x.repeat_interleave(n(2), dim=n(1)),
    "numpy: an index": lambda x: x[n(1)],
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_tensor_may_stand_for_a_number(placement: Placement) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for name, call in CALLS.items():
            result, expected = call(distribute_tensor(FULL, mesh, [placement])), call(FULL)
            assert isinstance(result, DTensor), name
            assert result.stride() == expected.stride(), name
            torch.testing.assert_close(result.full_tensor(), expected)

    run_ranks(2, program)


def test_a_number_that_is_not_real_is_no_place() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(FULL, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="start must be an 0-dim integral Tensor"):
            x.narrow(0, torch.tensor(2 + 0j), 2)

    run_ranks(2, program)


def test_another_number_is_another_call() -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(FULL, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert [x.view(t(n), -1).shape[0] for n in (2, 3, 2)] == [2, 3, 2]
        for n in (0, 1):
            torch.testing.assert_close(x.sum(t(n)).full_tensor(), FULL.sum(n))

    run_ranks(2, program)


class _Size(Tensor):
    """A size with a class of its own, which torch asks, or not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros:
            return None
        return Tensor.__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_sizes_may_be_among_plain_ones() -> None:
    size: Any = torch.tensor(3).as_subclass(_Size)
    asked = not isinstance(torch.zeros((2, size)), Tensor)  # torch 2.6 takes it for a plain number

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        sizes: Any = distribute_tensor(torch.tensor([2, 3]), mesh, [Shard(0)])
        made: Any = torch.zeros((2, sizes[1]))
        assert made.shape == (2, 3)
        if asked:
            assert isinstance(made, DTensor)
        assert sizes.new_full([sizes[0], 0], 1.0).shape == (2, 0)
        assert sizes.new_ones(sizes[1], 2).shape == (3, 2)
        assert torch.full([sizes[0]], 1.0, out=made.new_empty(0)).shape == (2,)

    run_ranks(2, program)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_lengths_without_dims_are_tensors_still(placement: Placement) -> None:
    """One overload of ctc_loss takes lists of lengths, the other tensors of any dims."""
    x = torch.arange(60.0).view(12, 5).sin().log_softmax(1)

    def loss(x: Any) -> float:
        lengths = torch.tensor(12), torch.tensor(3)
        return F.ctc_loss(x, torch.tensor([1, 2, 3]), *lengths).item()

    def program(rank: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)
            return loss(distribute_tensor(x, init_device_mesh("cpu", (2,)), [placement]))

    assert run_ranks(2, program) == [pytest.approx(loss(x))] * 2
