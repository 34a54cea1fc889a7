"""When buckets are reduced: beside backward, or at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tilework.cores import has_spare_core
from tilework.parallel import DistributedDataParallel
from tilework.parallel.data_parallel import reducer
from tilework.testing import run_ranks


def gradients(rank: int) -> tuple[list[Tensor], float]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    for step in range(3):
        model.zero_grad()
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        model(rows).square().sum().backward()
    report = model.report()
    assert len(report.buckets) > 3
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], report.hidden


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_bits_are_the_same_beside_backward_and_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for spare in (True, False):
        monkeypatch.setattr(reducer, "has_spare_core", lambda ranks, spare=spare: spare)
        found += [grads for grads, _ in run_ranks(2, gradients, kind=kind)]  # type: ignore[arg-type]
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


def test_without_a_spare_core_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "has_spare_core", lambda ranks: False)
    monkeypatch.setattr(reducer, "_LEAST_SHARE", 0.0)
    assert all(hidden == 0.0 for _, hidden in run_ranks(2, gradients))


@pytest.mark.parametrize(("share", "later"), [(0.0, True), (float("inf"), False)])
def test_where_others_want_the_cores_only_some_passes_are_at_once(
    share: float, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer, "has_spare_core", lambda ranks: False)
    monkeypatch.setattr(reducer, "_LEAST_SHARE", share)

    def program(rank: int) -> list[bool]:
        model, found = DistributedDataParallel(nn.Linear(2, 2)), []
        for _ in range(reducer._LOOK_EVERY + 2):
            model(torch.ones(1, 2)).sum().backward()
            found.append(model.reducer._at_once)
        return found

    expected = [not at % reducer._LOOK_EVERY or later for at in range(reducer._LOOK_EVERY + 2)]
    assert run_ranks(2, program) == [expected] * 2


def test_a_core_is_spare_beyond_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("tilework.cores.usable_cores", lambda: 4)
    assert [has_spare_core(ranks) for ranks in (1, 2, 3, 4)] == [True, True, False, False]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # of which two are in the group
    assert not has_spare_core(2)
