"""Memory by use: storages counted once, by what they are for, the same on a pretended rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilework.dtensor import DTensor, init_device_mesh
from tilework.inspect import MemoryByUse
from tilework.inspect.memory import Peak, Use
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.plan import pretend
from tilework.testing import run_ranks


def step(device: str, rows: int = 32) -> MemoryByUse:
    layers = (nn.Linear(64, 128, device=device), nn.GELU(), nn.Linear(128, 64, device=device))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryByUse() as memory:
        for _ in range(2):
            model(torch.zeros(rows, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        memory.begin_peak()
        model(torch.zeros(rows, 64, device=device)).sum().backward()
    return memory


def test_parameters_and_states_have_their_bytes() -> None:
    parameters = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    by_use = step("cpu").peak.by_use()
    assert by_use["parameters"] == parameters
    assert by_use["optimizer states"] == 2 * parameters + 4 * 4  # and a count of steps for each


def test_a_pretended_step_counts_as_a_real_step() -> None:
    found: list[Peak] = []
    with pretend(ranks=1) as job:
        job.run(lambda: found.append(step("cpu", rows=512).peak))
    assert found == [step("cpu", rows=512).peak]


def test_a_model_on_meta_has_no_memory() -> None:
    assert step("meta").peak.by_use()["parameters"] == 0


def test_activations_are_counted_by_module() -> None:
    by = step("cpu", rows=512).peak.by
    # The linear's output is kept for GELU's backward.
    assert by["Sequential.0", "activations"] == 512 * 128 * 4
    assert by["Sequential.1", "activations"] == 512 * 128 * 4


def test_views_of_a_storage_count_once_until_all_are_freed() -> None:
    with MemoryByUse() as memory:
        x = torch.zeros(100)
        view = x[50:]
        del x
        before = sum(memory.now.values())
        del view
        assert (before, sum(memory.now.values())) == (400, 0)


def test_gradients_count_once_backward_is_over() -> None:
    layer = nn.Linear(8, 8, bias=False)
    with MemoryByUse() as memory:
        layer(torch.ones(1, 8)).sum().backward()
        assert memory.now["gradients"] == 256
        layer.weight.grad = None
        assert memory.now["gradients"] == 0


def test_the_moment_of_the_peak_is_kept() -> None:
    with MemoryByUse() as memory:
        torch.zeros(1000)
        torch.zeros(10)
    assert memory.peak == Peak(4000, {("", "activations"): 4000})
    assert str(memory.peak).splitlines()[0] == "3.91 KiB at the peak"


def sharded(rank: int, way: str) -> dict[Use, int]:
    with MemoryByUse() as memory:
        model: nn.Module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        for layer in model.children() if way == "fully_shard" else ():
            fully_shard(layer)
        model = DistributedDataParallel(model) if way == "ddp" else model
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        return memory.now


@pytest.mark.parametrize(("way", "parts"), [("ddp", 1), ("fully_shard", 2)])
def test_ranks_count_what_they_hold(way: str, parts: int) -> None:
    counted = run_ranks(2, sharded, way)
    full = 2 * 64 * 64 * 4
    assert [each["optimizer states"] for each in counted] == [2 * full // parts + 8] * 2
    marks = 2 * 4 * (way == "fully_shard")  # by layer, at the end of the shards
    assert [each["gradients"] for each in counted] == [full // parts + marks] * 2


def test_counting_changes_nothing_in_a_tensor_parallel_step() -> None:
    def program(rank: int) -> float:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        ]
        model = nn.Sequential(*blocks)
        mesh = init_device_mesh("cpu", (2,))
        for block in blocks:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
        return float(sum(each.sum().item() for each in full))

    def counted(rank: int) -> float:
        with MemoryByUse():
            return program(rank)

    assert run_ranks(2, counted) == run_ranks(2, program)


def test_gathered_parameters_are_buffers() -> None:
    def program(rank: int) -> int:
        model = fully_shard(nn.Linear(64, 64, bias=False))
        with MemoryByUse() as memory:
            model(torch.ones(2, 64))
        return memory.peak.by_use()["buffers"]

    assert min(run_ranks(2, program)) >= 64 * 64 * 4
