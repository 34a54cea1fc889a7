"""Advice for errors that are torch's, in programs that use tilework."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from tests.launch.conftest import Launch
from tilework.launch.failure_report import hint
from tilework.mesh import init_device_mesh
from tilework.parallel import ColwiseParallel, parallelize_module
from tilework.testing import run_ranks


def error_of_torchs_all_reduce() -> str:
    with pytest.raises(ValueError, match="has not been initialized") as caught:
        torch.distributed.all_reduce(torch.ones(1))
    return hint(caught.value)


def test_torchs_calls_after_tileworks_init() -> None:
    for advice in run_ranks(2, lambda rank: error_of_torchs_all_reduce()):
        assert "import tilework.distributed in place of torch.distributed" in advice


def test_torchs_classes_after_tileworks_init_name_the_module_here() -> None:
    def program(rank: int) -> list[str]:
        advice = []
        for use in (DistributedSampler, nn.parallel.DistributedDataParallel):
            with pytest.raises(ValueError, match="has not been initialized") as caught:
                use(nn.Linear(1, 1))  # type: ignore[arg-type]
            advice.append(hint(caught.value))
        return advice

    for sampler, ddp in run_ranks(2, program):
        assert "import tilework.data in place of torch.utils.data.distributed" in sampler
        assert "import tilework.parallel in place of torch.nn.parallel" in ddp


def test_a_script_of_torch_is_told_of_tcp(launch: Launch) -> None:
    launch.with_torch()
    done = launch('import torch.distributed as dist; dist.init_process_group("gloo")')
    assert "hint: torch's own env:// meets at a TCP port" in done.err
    assert "tilework run --tcp" in done.err


def test_torchs_calls_without_tilework_are_not_its_business() -> None:
    assert error_of_torchs_all_reduce() == ""


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, heads * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = self.q_proj(x).view(1, 2, -1, 4)
        return heads


def test_heads_that_ranks_cannot_share() -> None:
    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(Attention(3), mesh, {"q_proj": ColwiseParallel()})
        with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
            model(torch.ones(1, 2, 6))
        return hint(caught.value)

    for advice in run_ranks(2, program):
        assert "q_proj has 3 heads of 4 features, which 2 ranks cannot share evenly" in advice
        assert "sizes=(8, 4)" in advice


def test_files_of_dtensors() -> None:
    text = "Unsupported global: GLOBAL tilework.dtensor.tensor._rebuild was not an allowed"
    assert "import tilework.dtensor" in hint(pickle.UnpicklingError(text))


def test_other_errors_get_none() -> None:
    assert hint(ValueError("bad rows")) == ""
