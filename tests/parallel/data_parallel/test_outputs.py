"""Outputs of any structure: their tensors are found, and keep their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.parallel.data_parallel.models import EACH_SETTING, WIDTH, seeded, train
from tilework.parallel.data_parallel.arguments import moved


@dataclass
class Result:
    first: Tensor | None
    others: dict[str, Tensor]


@dataclass(frozen=True)
class Fixed:
    first: Tensor
    others: tuple[Tensor, ...]


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


def outputs(kind: str, a: Tensor, b: Tensor) -> Any:
    if kind == "dataclass":
        return Result(a, {"b": b})
    if kind == "frozen":
        return Fixed(a, (b,))
    return Pair(a, [b]) if kind == "named" else {"a": a, "nested": {"b": (b, None, 3)}}


def read(output: Any) -> Tensor:
    if isinstance(output, Result):
        return output.others["b"] if output.first is None else output.first + output.others["b"]
    if isinstance(output, Fixed):
        return output.first + output.others[0]
    if isinstance(output, Pair):
        return output.left + output.right[0]
    both: Tensor = output["a"] + output["nested"]["b"][0]
    return both


class Packed(nn.Module):
    """Returns the outputs of two layers in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        return outputs(self.kind, self.a(x), self.b(x).relu())


@EACH_SETTING
@pytest.mark.parametrize("kind", ["dataclass", "frozen", "named", "dict"])
def test_structured_outputs(kind: str, settings: dict[str, Any]) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        result = model(x)
        assert type(result) is type(outputs(kind, x, x))
        return read(result)

    train(seeded(lambda: Packed(kind)), run=run, steps=2, **settings)


def test_a_dataclass_without_one_of_its_tensors() -> None:
    class Half(Packed):
        def forward(self, x: Tensor) -> Any:
            return Result(None, {"b": self.b(x)})

    train(
        seeded(lambda: Half("dataclass")),
        run=lambda model, x: read(model(x)),
        find_unused_parameters=True,
    )


def test_packed_sequences_are_moved_without_their_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    found = moved((packed,), torch.device("meta"))[0]
    assert isinstance(found, PackedSequence)
    assert found.sorted_indices is not None
    assert found.data.is_meta
    assert found.sorted_indices.is_meta
    assert torch.equal(found.batch_sizes, packed.batch_sizes)
