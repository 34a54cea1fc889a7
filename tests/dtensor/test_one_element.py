"""Python numbers of tensors of one element, and the sign of zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


@pytest.mark.parametrize("function", [float, int, bool, complex])
def test_parameter_of_one_element_is_a_number(function: Callable[[Any], Any]) -> None:
    def main(rank: int) -> tuple[Any, int, int]:
        mesh = init_device_mesh("cpu", (2,))
        scale = nn.Parameter(distribute_tensor(torch.tensor(2.5), mesh, [Replicate()]))
        before = scale._version
        return function(scale), before, scale._version

    for number, before, after in run_ranks(2, main):
        assert number == function(2.5)
        assert before == after


def test_number_of_a_tensor_is_no_write() -> None:
    def main(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]).requires_grad_()
        y = x * 2
        z = y * y
        assert float(y) == 6.0
        z.backward()  # type: ignore[no-untyped-call]
        assert isinstance(x.grad, DTensor)
        return x.grad.full_tensor()

    assert all(grad == 24.0 for grad in run_ranks(2, main))


_READS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[[0, 3]],
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 3])),
    "take": lambda x: x.take(torch.tensor([0, 3])),
    "gather": lambda x: x.gather(0, torch.tensor([0, 3])),
    "take_along_dim": lambda x: x.take_along_dim(torch.tensor([0, 3]), 0),
    "max": lambda x: x.reshape(2, 2).max(0).values,
    "min": lambda x: x.reshape(2, 2).min(0).values,
    "median": lambda x: x.reshape(2, 2).median(0).values,
    "sort": lambda x: x.sort().values,
    "topk": lambda x: x.topk(2, largest=False).values,
    "cummax": lambda x: x.cummax(0).values,
    "flip": lambda x: x.flip(0),
    "amax": lambda x: x.reshape(2, 2).amax(0),
    "embedding": lambda x: nn.functional.embedding(torch.tensor([0, 3]), x.unsqueeze(1)),
}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", _READS)
def test_sign_of_zero_is_kept(name: str, ranks: int) -> None:
    values = torch.tensor([-0.0, 1.0, 2.0, 0.0])

    def main(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (ranks,))
        result = _READS[name](distribute_tensor(values, mesh, [Shard(0)]))
        assert isinstance(result, DTensor)
        return result.full_tensor()

    expected = _READS[name](values)
    for result in run_ranks(ranks, main):
        assert torch.equal(result.signbit(), expected.signbit())
        assert torch.equal(result, expected)
