"""Settings of DistributedDataParallel, its files, and what it tells about itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tests.parallel.data_parallel.models import ROWS, batch, gradients, mlp, mse, same_gradients
from tilework.parallel import DistributedDataParallel, MixedPrecision
from tilework.testing import run_ranks


def test_buffers_are_those_of_the_first_rank() -> None:
    def program(rank: int, broadcast: bool | None) -> float:
        ddp: Any = DistributedDataParallel(nn.BatchNorm1d(1), broadcast_buffers=broadcast)
        for _ in range(2):
            ddp(torch.tensor([[rank + 0.0], [rank + 2.0]])).sum().backward()
        mean: float = ddp.module.running_mean.item()
        return round(mean, 4)

    assert run_ranks(2, lambda rank: program(rank, None)) == [0.19, 0.29]
    assert run_ranks(2, lambda rank: program(rank, False)) == [0.19, 0.38]


def test_buffers_stay_between_forward_passes_of_one_backward_pass() -> None:
    """Autograd saves them in the first; the discriminator of a GAN has two."""

    def program(rank: int) -> list[float]:
        ddp: Any = DistributedDataParallel(nn.BatchNorm1d(1))
        means = []
        for _ in range(2):
            (ddp(torch.full((2, 1), rank + 0.0)) + ddp(torch.full((2, 1), 1.0))).sum().backward()
            means.append(round(ddp.module.running_mean.item(), 4))
        return means

    assert run_ranks(2, program) == [[0.1, 0.181], [0.19, 0.271]]


def test_reductions_that_are_delayed() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain, replica = copy.deepcopy(model), copy.deepcopy(model)
        delayed = [("0.weight", replica[0].weight), ("0.bias", replica[0].bias)]
        ddp: Any = DistributedDataParallel(
            replica,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=replica[0].weight,
        )
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(2):
            x, y = batch(2, step)
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


def test_mixed_precision() -> None:
    model: Any = mlp()

    def program(rank: int) -> tuple[torch.dtype, torch.dtype, float]:
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), mixed_precision=precision)
        plain: Any = copy.deepcopy(model)
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        out = ddp(x[own])
        mse(out.float(), y[own]).backward()
        mse(plain(x), y).backward()
        same_gradients(ddp, plain, rtol=0.05, atol=0.02)
        return out.dtype, next(ddp.parameters()).dtype, 0.0

    assert run_ranks(2, program)[0][:2] == (torch.bfloat16, torch.float32)


def test_state_dicts() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp())
        saved = ddp.state_dict()
        assert all(name.startswith("module.") for name in saved)
        ddp.load_state_dict(saved)
        other: Any = mlp()
        nn.init.zeros_(other[0].weight)
        ddp.load_state_dict(other.state_dict())
        assert not ddp.module[0].weight.any()
        other.load_state_dict(ddp.module.state_dict())

    run_ranks(2, program)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda ddp: pickle.loads(pickle.dumps(ddp)),
        lambda ddp: _through_file(ddp),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_replicas_of_their_own(copied: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
        x, y = batch(2)
        mse(ddp(x[rank::2]), y[rank::2]).backward()
        made = copied(ddp)
        for each in (ddp, made):
            each.zero_grad()
            mse(each(x[rank::2]), y[rank::2]).backward()
        assert all(map(torch.equal, gradients(ddp), gradients(made)))

    run_ranks(2, program)


def test_a_copy_of_a_compiled_module_computes_with_the_weights_of_the_copy() -> None:
    def program(rank: int) -> bool:
        ddp: Any = DistributedDataParallel(mlp())
        ddp.compile(backend="eager")
        copied = copy.deepcopy(ddp)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        return bool(copied(batch(2)[0]).any())

    assert run_ranks(2, program) == [False, False]


def _through_file(ddp: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_inference_does_not_communicate() -> None:
    def program(rank: int) -> int:
        ddp: Any = DistributedDataParallel(nn.BatchNorm1d(2))
        before = dist.get_default_group().get_sequence_number_for_group()
        with torch.no_grad():
            ddp.eval()(torch.ones(2, 2))
        return dist.get_default_group().get_sequence_number_for_group() - before

    assert run_ranks(2, program) == [0, 0]


def test_logging_data() -> None:
    def program(rank: int) -> dict[str, Any]:
        ddp: Any = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001, static_graph=True)
        for step in range(3):
            x, _ = batch(2, step)
            ddp(x).sum().backward()
        data: dict[str, Any] = ddp.get_ddp_logging_data()
        return data

    data = run_ranks(2, program)[1]
    assert data["world_size"] == 2
    assert data["rank"] == 1
    assert data["module_name"] == "Sequential"
    assert data["static_graph"] is True
    assert data["dtypes"] == "float32"
    assert data["iteration"] == 3
    assert data["has_rebuilt_buckets"] is True
    assert sum(map(int, data["bucket_sizes"].split(", "))) == data["total_parameter_size_bytes"]
