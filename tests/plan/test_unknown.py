"""Training programs run pretended as they are, and branch on values in the open."""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tests.plan.trainings import TRAININGS
from tilework.errors import PretendError
from tilework.inspect import MemoryByUse
from tilework.launch.program import Script
from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.plan import Branch, PlanReport, pretend
from tilework.testing import run_ranks


def planned(program: Callable[[], Any], ranks: int = 3) -> PlanReport:
    with pretend(ranks=ranks) as job:
        return job.run(program)


@pytest.mark.parametrize("program", TRAININGS)
def test_a_training_runs_as_it_is(program: Callable[[], None]) -> None:
    assert planned(program).is_good


def branch(act: Callable[[], Any]) -> list[Branch]:
    def program() -> None:
        loss = DistributedDataParallel(nn.Linear(4, 4))(torch.randn(2, 4)).sum()
        if loss.item() > 1:
            act()

    return list(planned(program).branches)


def test_a_branch_that_changes_nothing_is_said() -> None:
    (found,) = branch(lambda: None)
    assert "test_unknown.py" in found.site
    assert str(found).endswith("same for the plan")


def test_a_branch_with_another_collective_is_planned_both_ways() -> None:
    (found,) = branch(lambda: dist.all_reduce(torch.ones(1000)))
    assert found.report is not None
    assert "all ranks must take one way" in str(found)


def test_ranks_that_part_on_the_other_way_are_found() -> None:
    def act() -> None:
        if dist.get_rank() == 1:
            dist.barrier()
        dist.all_reduce(torch.ones(1))

    (found,) = branch(act)
    assert found.report is not None
    assert found.report.mismatches


def test_an_error_with_a_number_is_the_end_of_the_other_way() -> None:
    def program() -> None:
        loss = torch.randn(3).sum().item()
        if loss > 10:
            raise ValueError(f"the loss is {loss:.2f}")

    (found,) = planned(program, 1).branches
    assert found.ends == "ValueError: the loss is ???"


def test_a_nan_never_decides() -> None:
    def program() -> None:
        values = torch.randn(3).sum(), torch.randn(3).sum().item()
        assert not any(map(math.isnan, values))
        assert f"{values[0]:.2f} {values[1]:.1f}" == "??? ???"
        if float(values[0]) > 2 or float(values[1]) > 2:
            print("large")
        print("%.2f" % values[0])  # noqa: UP031 - as people write
        if torch.tensor(values[1]) > 2 or torch.tensor([1.0, values[1]])[1] > 2:
            print("large")

    assert len(planned(program).branches) == 2


def test_numpy_and_texts_keep_numbers_unknown() -> None:
    def program() -> None:
        losses = [torch.randn(3).sum().item() for _ in range(2)]
        assert np.isfinite(losses[0])
        if np.mean(losses) < 1 or (np.array([1.0]) * losses[0] > 2).any():
            print("small")
        if np.float32(1) < losses[0] or float(f"{losses[0]:.2f}") > 3:
            print("large")
        if json.loads(json.dumps({"loss": losses[0]}))["loss"] < 1 or math.fsum(losses) > 2:
            print("small")

    assert len(planned(program).branches) == 3


def map_of(make: Callable[[Any], Any]) -> None:
    make(torch.randn(3).sum().item())


PLAIN: list[Callable[[Any], Any]] = [
    *(np.float64, Decimal, lambda x: mean([x]), lambda x: struct.pack("d", x)),
    *(lambda x: array("d", [x]), lambda x: torch.FloatTensor([x]), lambda x: float("%.2f" % x)),  # noqa: UP031
]


@pytest.mark.parametrize("make", PLAIN)
def test_a_plain_number_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(PretendError, match=r"test_unknown\.py:.*only known in a real run"):
        planned(partial(map_of, make), 1)


def test_a_script_takes_float_of_a_loss(tmp_path: Path) -> None:
    text = "import torch\nloss = torch.randn(3).sum()\nif float(loss) > 1:\n    print(loss)\n"
    (tmp_path / "train.py").write_text(text)
    main = sys.modules["__main__"]
    try:
        (found,) = planned(lambda: Script(str(tmp_path / "train.py")).run(0), 2).branches
    finally:
        sys.modules["__main__"] = main
    assert "train.py:3" in found.site


def test_a_loop_that_ends_by_a_value_is_refused() -> None:
    def program() -> None:
        while not torch.randn(3).sum().item() < 1:
            pass

    with pytest.raises(PretendError, match="a loop without another end"):
        planned(program, 1)


def cast() -> int:
    with MemoryByUse() as memory:
        model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3]))
        loss.backward()  # type: ignore[no-untyped-call]
    return memory.peak.bytes


def made_on_meta() -> int:
    with MemoryByUse() as memory:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for layer in model:
            fully_shard(layer)
        fully_shard(model).to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    return memory.peak.bytes


@pytest.mark.parametrize("program", [cast, made_on_meta])
def test_the_peak_is_that_of_a_real_run(program: Callable[[], int]) -> None:
    found: list[int] = []
    planned(lambda: found.append(program()), 2)
    assert found == run_ranks(2, lambda rank: program())


def test_tensors_that_the_program_puts_on_meta_count_nothing() -> None:
    def program() -> int:
        with MemoryByUse() as memory:
            weight = nn.Linear(64, 64).weight
            shown = [torch.ones(64, 64, device="meta"), weight.to("meta"), weight.detach()]
            shown[0] = shown[0] @ shown[1]
            with pytest.raises(RuntimeError, match="meta"):
                bool(shown[0].sum() > 0)
        return memory.peak.bytes

    found: list[int] = []
    planned(lambda: found.append(program()), 1)
    assert found == [program()]
