"""DiLoCo: equal to a plain loop over replicas, few bytes, and no replica stops the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

import tilework.distributed as dist
from tests.launch.conftest import Launch
from tilework.comm.backend import core_error
from tilework.mesh import init_device_mesh
from tilework.parallel import DiLoCo, Resilient, fully_shard
from tilework.testing import run_ranks

EVERY = 3
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def nesterov(parameters: Iterable[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(replica: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * replica + step))


def train(model: nn.Module, inner: Optimizer, replica: int, step: int) -> None:
    x = batch(replica, step)
    inner.zero_grad()
    loss: Any = mse_loss(model(x), x[:, :2])
    loss.backward()
    inner.step()


def reference(rounds: list[list[int]], outer: Make = nesterov) -> list[torch.Tensor]:
    """What replicas have at the end; each round has the replicas that take part in it."""
    common = [p.detach().clone() for p in make_model().parameters()]
    outer_parameters = [nn.Parameter(each) for each in common]
    optimizer = outer(outer_parameters)
    models = {replica: make_model() for replica in rounds[0]}
    inner = {replica: AdamW(models[replica].parameters(), lr=0.01) for replica in models}
    for number, present in enumerate(rounds):
        ways = []
        for replica in present:
            if number and replica not in rounds[number - 1]:  # it was started again
                inner[replica] = AdamW(models[replica].parameters(), lr=0.01)
            with torch.no_grad():
                for own, value in zip(models[replica].parameters(), outer_parameters, strict=True):
                    own.copy_(value)
            for step in range(EVERY * number, EVERY * (number + 1)):
                train(models[replica], inner[replica], replica, step)
            own_values = [p.detach() for p in models[replica].parameters()]
            ways.append([a.detach() - b for a, b in zip(outer_parameters, own_values, strict=True)])
        for at, value in enumerate(outer_parameters):
            value.grad = torch.stack([way[at] for way in ways]).mean(0)
        optimizer.step()
    return [each.detach() for each in outer_parameters]


def assert_close(values: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for value, right in zip(values, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_outer_steps_are_those_of_a_plain_loop(replicas: int) -> None:
    def program(rank: int) -> list[torch.Tensor]:
        model = make_model()
        inner = AdamW(model.parameters(), lr=0.01)
        outer = DiLoCo(model, nesterov, every=EVERY)
        for step in range(3 * EVERY):
            train(model, inner, rank, step)
            outer.step()
            assert outer.is_apart == bool((step + 1) % EVERY)
        return [p.detach() for p in model.parameters()]

    results = run_ranks(replicas, program)
    for values in results:
        assert_close(values, reference([list(range(replicas))] * 3))
        assert all(torch.equal(a, b) for a, b in zip(values, results[0], strict=True))


def test_replicas_of_shards() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        model = make_model()
        fully_shard(model, mesh=mesh["shard"])
        inner = AdamW(model.parameters(), lr=0.01)
        outer = DiLoCo(model, nesterov, every=EVERY, mesh=mesh["replica"])
        for step in range(2 * EVERY):
            train(model, inner, mesh["replica"].get_local_rank(), step)
            outer.step()
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]

    for values in run_ranks(4, program):
        assert_close(values, reference([[0, 1]] * 2))


def test_each_parameter_is_sent_once_in_a_round() -> None:
    def program(rank: int) -> list[str]:
        outer = DiLoCo(make_model(), nesterov, every=4)
        for _ in range(8):
            outer.step()
        told = [each.what for each in dist.get_default_group().flight_entries()]
        return [what for what in told if what.startswith("all_reduce")]

    whole = sum(p.numel() for p in make_model().parameters())
    told = run_ranks(2, program)[0]
    assert [str(whole) in what for what in told] == [True] * 2, told


@pytest.mark.parametrize(
    ("what", "message"),
    [("every", "every=2 on rank 0"), ("size", "shape|float32"), ("values", "hash")],
)
def test_replicas_that_differ_are_named(what: str, message: str) -> None:
    def program(rank: int) -> str:
        model = make_model()
        odd = rank == 1
        if what == "size" and odd:
            model[2] = nn.Linear(8, 3)
        if what == "values" and odd:
            nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
        outer = DiLoCo(model, nesterov, every=1 if what == "every" and odd else 2)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(outer.every - 1):
            outer.step()
        with pytest.raises(ValueError, match=message) as caught:
            outer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(caught.value)

    assert all("replicas differ" in text and "rank 1" in text for text in run_ranks(3, program))


def test_a_restored_state_goes_on() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        saved: dict[str, Any] = {}
        for first, last in ((0, 1), (1, 3)):
            model = make_model()
            inner = SGD(model.parameters(), lr=0.1)
            outer = DiLoCo(model, nesterov, every=2)
            if saved:
                outer.load_state_dict(saved)
            for step in range(2 * first, 2 * last):
                train(model, inner, rank, step)
                outer.step()
            saved = outer.state_dict()
        straight = make_model()
        inner = SGD(straight.parameters(), lr=0.1)
        outer = DiLoCo(straight, nesterov, every=2)
        for step in range(6):
            train(straight, inner, rank, step)
            outer.step()
        assert_close(model.parameters(), straight.parameters())
        return []

    run_ranks(2, program)


def test_a_killed_replica_stops_nobody_and_nothing_is_trained_again() -> None:
    def program(rank: int) -> tuple[int, list[torch.Tensor]]:
        model = make_model()
        inner = AdamW(model.parameters(), lr=0.01)
        outer = DiLoCo(model, nesterov, every=EVERY)
        trained = 0

        def step(state: Any, number: int) -> None:
            nonlocal trained
            for turn in outer.steps():
                train(model, inner, rank, EVERY * number + turn)
                trained += 1
                if (rank, number, turn) == (1, 1, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                outer.step()

        for _ in Resilient(lambda: {"outer": outer}, step).run(3):
            pass
        return trained, [p.detach() for p in model.parameters()]

    results = run_ranks(3, program, kind="processes", return_exceptions=True)
    expected = reference([[0, 1, 2], [0, 2], [0, 2]])
    for trained, values in (results[0], results[2]):
        assert trained == 3 * EVERY
        assert_close(values, expected)


def test_copies_wait_until_replicas_are_equal() -> None:
    def program(rank: int) -> tuple[int, list[torch.Tensor]]:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        outer = DiLoCo(model, nesterov, every=EVERY)

        def step(state: Any, number: int) -> None:
            train(model, inner, rank, number)
            outer.step()

        loop = Resilient(lambda: {"model": model, "outer": outer}, step)
        for _ in loop.run(2 * EVERY):
            pass
        return loop.statistics()["snapshots"], list(model.parameters())

    assert [snapshots for snapshots, _ in run_ranks(2, program)] == [2, 2]


COMES_BACK = """
    import os, signal, time, torch
    import tilework.distributed as dist
    from tests.parallel.test_diloco import *

    dist.init_process_group()
    rank = int(os.environ["RANK"])
    model = make_model()
    inner = AdamW(model.parameters(), lr=0.01)
    outer = DiLoCo(model, nesterov, every=EVERY)
    rounds = []

    def step(state, number):
        for turn in outer.steps():
            train(model, inner, rank, EVERY * number + turn)
            if (rank, number) == (1, 1) and "TILEWORK_REJOIN" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            outer.step()
        rounds.append(dist.get_world_size())
        time.sleep(0.05)  # else the process that is started has no turn

    for number, _ in Resilient(lambda: {"outer": outer}, step).run(100_000):
        told = torch.tensor([len(rounds) > 2 and rounds[-2:] == [2, 2] and 1 in rounds])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if told.item():
            break
    torch.save([rounds, [p.detach() for p in model.parameters()]], f"end-{rank}")
"""


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
def test_a_killed_replica_comes_back_at_an_outer_step(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.with_torch()
    launch.environment["PYTHONPATH"] += f":{Path(__file__).parents[2]}"
    done = launch(COMES_BACK, "-n", "2", "--restarts", "1")
    assert done.status == 0, done.err
    (rounds, values), (late, others) = (torch.load(tmp_path / f"end-{rank}") for rank in range(2))
    alone = rounds.count(1)
    assert rounds == [2] + [1] * alone + [2, 2]
    assert late == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
    assert_close(values, reference([[0, 1], *[[0]] * alone, [0, 1], [0, 1]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(make_model(), nesterov, every=0), "every must be at least 1"),
        (lambda: DiLoCo(nn.Tanh(), nesterov, every=1), "no parameters"),
    ],
)
def test_wrong_use(make: Callable[[], DiLoCo], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
