"""Arguments by numpy's names, which torch takes, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dtensor.sharded_values import cut
from tests.rounding import assert_close
from tilework.dtensor import Shard, init_device_mesh
from tilework.dtensor.debug.causes import strict
from tilework.sharded import ChunkShardingSpec, shard_tensor
from tilework.testing import run_ranks
from tilework.tiled.normalize import torch_arguments

#: torch's own types do not know these names.
F: Any = torch
X = torch.tensor([[3.0, 1.0], [2.0, 5.0], [1.0, 0.0], [9.0, 4.0]])
CALLS: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: F.softmax(x, axis=0),
    "x.log_softmax": lambda x: x.log_softmax(axis=0),
    "special.softmax": lambda x: F.special.softmax(x, axis=0),
    "sort": lambda x: F.sort(x, axis=0)[0],
    "argsort": lambda x: x.argsort(axis=0),
    "topk": lambda x: x.topk(1, axis=0)[0],
    "cumsum": lambda x: F.cumsum(x, axis=0),
    "repeat_interleave": lambda x: F.repeat_interleave(x, 2, axis=0),
    "tensor_split": lambda x: F.tensor_split(x, 2, axis=1)[1],
    "chunk": lambda x: F.chunk(x, 2, axis=1)[1],
    "split_copy": lambda x: F.split_copy(x, 1, axis=1)[0],
    "scatter": lambda x: F.scatter(x, axis=0, index=torch.tensor([[1, 1]]), src=torch.ones(1, 2)),
    "index_add": lambda x: x.index_add(axis=0, index=torch.tensor([1]), source=torch.ones(1, 2)),
    "swapaxes": lambda x: F.swapaxes(x, axis0=0, axis1=1),
    "sum": lambda x: x.sum(axis=0, keepdims=True),
    "std": lambda x: x.std(axis=0),
    "max": lambda x: F.max(x, axis=0)[1],
    "mul": lambda x: F.mul(x1=x, x2=x),
    "matmul": lambda x: F.matmul(x, x2=x.t()),
    "reshape": lambda x: F.reshape(a=x, shape=(2, 4)),
    "exp_": lambda x: F.exp_(input=x.clone()),
    "detach": lambda x: F.detach(input=x),
    "permute_copy": lambda x: F.permute_copy(input=x, dims=(1, 0)),
    "flatten": lambda x: F.flatten(x=x),
    "conj": lambda x: F.conj(a=x),
    "linalg.diagonal": lambda x: F.linalg.diagonal(A=x[:2]),
    "where": lambda x: F.where(condition=x > 1, input=x, other=-x),
    # Names of their own, which stay as they are.
    "cdist": lambda x: F.cdist(x1=x, x2=x + 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x1=x, x2=x * x),
    "trapezoid": lambda x: F.trapezoid(x, x=x),
    "tensordot": lambda x: F.tensordot(a=x, b=x.t(), dims=1),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_calls_of_dtensors(placement: Shard) -> None:
    def program(rank: int) -> dict[str, torch.Tensor]:
        x = cut(X, init_device_mesh("cpu", (2,)), [placement])
        with strict():  # nothing is gathered
            return {name: call(x).full_tensor() for name, call in CALLS.items()}

    for found in run_ranks(2, program):
        for name, value in found.items():
            assert_close(value, CALLS[name](X))


def test_calls_of_sharded_tensors() -> None:
    names = ["softmax", "cumsum", "sum", "chunk", "swapaxes", "mul"]

    def program(rank: int) -> list[torch.Tensor]:
        spec = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
        found: Any = [CALLS[name](shard_tensor(X, spec)) for name in names]
        return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in found]

    for found in run_ranks(2, program):
        for name, value in zip(names, found, strict=True):
            assert_close(value, CALLS[name](X))


def test_names_are_left_to_python_functions() -> None:
    softmax = torch.nn.functional.softmax
    assert torch_arguments(softmax, (), {"axis": 0}) == ((), {"axis": 0})
    assert torch_arguments(torch.Tensor.sum, (), {"axis": 0}) == ((), {"dim": 0})
    assert torch_arguments(torch.polygamma, (), {"input": 2}) == ((), {"input": 2})
