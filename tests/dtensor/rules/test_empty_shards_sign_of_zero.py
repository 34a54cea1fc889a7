"""The sign of zero, in what is read from rows that another rank has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.tables import each
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

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


@each("ranks", [2, 3, 5])
@each("name", _READS)
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
