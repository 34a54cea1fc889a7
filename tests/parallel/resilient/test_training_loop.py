"""Training that outlives ranks: the losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tilework.distributed as dist
from tests.parallel.resilient.programs import BUILDS, make_loop, undisturbed
from tilework.checkpoint import CheckpointManager, asynchronous, saving
from tilework.comm.elastic.grow import rejoin
from tilework.comm.groups import _SUCCESSORS
from tilework.comm.world import current_world
from tilework.parallel import Resilient
from tilework.store import HashStore
from tilework.testing import run_ranks

STEPS = 6


class Gone(Exception):
    """Ends a rank in the middle of a step, as a bug would."""


def losses_with(kind: str, n: int, ends: dict[int, int], **options: Any) -> list[Any]:
    """The losses of ``n`` ranks, of which some end in the step that ``ends`` says."""

    def program(rank: int) -> object:
        def disturb(number: int) -> None:
            if ends.get(rank) == number:
                raise Gone

        loop = make_loop(kind, disturb, **options)
        results: list[float] = []
        for number, loss in loop.run(STEPS):
            assert number == len(results)
            results.append(loss)
        assert [event.kind for event in loop.events] == ["started"] + ["lost"] * len(
            set(ends.values())
        )
        return results, dist.get_world_size()

    return run_ranks(n, program, return_exceptions=True)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", BUILDS)
def test_a_rank_lost_in_any_layout_loses_no_step(kind: str, shared: bool) -> None:
    results = losses_with(kind, 3, {1: 3}, shared=shared)
    assert isinstance(results[1], Gone)
    for rank in (0, 2):
        losses, size = results[rank]
        assert size == 2
        assert losses == pytest.approx(undisturbed(kind, STEPS), rel=1e-4)


def test_ranks_lost_one_after_the_other() -> None:
    results = losses_with("sharded", 4, {0: 1, 3: 2, 1: 4})
    assert results[2] == (pytest.approx(undisturbed("sharded", STEPS), rel=1e-4), 1)


def test_two_replicas_survive_two_deaths_at_once() -> None:
    results = losses_with("sharded", 4, {0: 2, 1: 2}, shared=False, replicas=2)
    for rank in (2, 3):
        assert results[rank] == (pytest.approx(undisturbed("sharded", STEPS), rel=1e-4), 2)


def test_what_no_memory_holds_is_an_error_on_all_ranks() -> None:
    results = losses_with("sharded", 3, {0: 2, 1: 2}, shared=False, replicas=1)
    lost = results[2]
    assert isinstance(lost, dist.DistBackendError | tuple)
    if isinstance(lost, dist.DistBackendError):
        assert "more than replicas=1 were lost at once" in str(lost)


class Saved:
    """Checkpoints in a list."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, Any]] = []

    def save(self, step: int, state: Any) -> None:
        self.saved.append((step, {k: v.clone() for k, v in state["model"].state_dict().items()}))

    def resume(self, into: Any) -> int | None:
        if not self.saved:
            return None
        step, model = self.saved[-1]
        into["model"].load_state_dict(model)
        return step

    def should_save(self, step: int) -> bool:
        return False

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_what_no_memory_holds_comes_from_the_last_checkpoint(kind: str, tmp_path: Path) -> None:
    """Ranks 0 and 2 keep each other's part, and are lost at once."""

    def program(rank: int) -> object:
        def disturb(number: int) -> None:
            if rank in (0, 2) and number == 5:
                raise Gone

        manager = CheckpointManager(tmp_path, every=2)
        loop = make_loop(kind, disturb, shared=False, replicas=1, checkpoint=manager)
        return list(loop.run(7)), [(event.kind, event.steps) for event in loop.events]

    results: list[Any] = run_ranks(4, program, return_exceptions=True)
    expected = undisturbed(kind, 7)
    for rank in (1, 3):
        losses, events = results[rank]
        assert [number for number, _ in losses] == [0, 1, 2, 3, 4, 4, 5, 6]
        assert dict(losses) == pytest.approx(dict(enumerate(expected)), rel=1e-4)
        assert events == [("started", 0), ("lost", 4)]


def test_a_time_limit_saves_and_ends_the_loop_on_all_ranks() -> None:
    def program(rank: int) -> object:
        checkpoints = Saved()
        limit = timedelta(seconds=0.0 if rank == 1 else 1000)
        loop = make_loop(
            "replicated", lambda number: None, checkpoint=checkpoints, time_limit=limit
        )
        numbers = [number for number, _ in loop.run(STEPS)]
        again = make_loop("replicated", lambda number: None, checkpoint=checkpoints)
        rest = [number for number, _ in again.run(3)]
        return numbers, [step for step, _ in checkpoints.saved], bool(loop.stopped), rest

    assert run_ranks(2, program) == [([0], [1], True, [1, 2])] * 2


def test_sigterm_before_the_first_step_says_that_nothing_is_saved(tmp_path: Path) -> None:
    program = """
import os, signal, sys, torch
import tilework.distributed as dist
from tilework.checkpoint import CheckpointManager
from tilework.parallel import Resilient

def step(state, number):
    os.kill(os.getpid(), signal.SIGTERM)

dist.init_process_group("shm")
loop = Resilient(lambda: {"w": torch.ones(2)}, step, checkpoint=CheckpointManager(sys.argv[1]))
for number, _ in loop.run(5):
    print(number)
print(loop.stopped, loop.steps)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "0\nSIGTERM 1\n", ended.stderr
    assert "SIGTERM before the first step" in ended.stderr


@pytest.mark.parametrize(("every", "steps"), [(1000, 2), (1, 1)])
def test_a_rank_lost_in_the_last_save_does_not_cost_the_checkpoint(
    tmp_path: Path, every: int, steps: int
) -> None:
    """If the save was due, the other ranks save again; else they save after another step."""

    class Dying(CheckpointManager):
        def save(self, step: int, state: Any, metrics: Any = None) -> None:
            if dist.get_rank() == 1 and dist.get_world_size() == 3:
                raise Gone
            super().save(step, state, metrics)

    def program(rank: int) -> object:
        limit = timedelta(seconds=0.0 if rank == 0 else 1000)
        manager = Dying(tmp_path, every=every)
        loop = make_loop("replicated", lambda number: None, checkpoint=manager, time_limit=limit)
        return [number for number, _ in loop.run(STEPS)], bool(loop.stopped), manager.latest()

    results: list[Any] = run_ranks(3, program, return_exceptions=True)
    assert (
        results[0]
        == results[2]
        == (
            list(range(steps)),
            True,
            str(tmp_path / f"step-{steps:08}"),
        )
    )


def test_a_rank_lost_in_a_save_in_the_background_does_not_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks save the state that they go on with."""
    write = saving.write_and_commit

    def dying(save: Any, elements: Any, ranks: Any, count: Any) -> None:
        if ranks.number == 1 and len(ranks.all) == 3:
            raise Gone
        write(save, elements, ranks, count)

    monkeypatch.setattr(asynchronous, "write_and_commit", dying)

    def program(rank: int) -> object:
        def disturb(number: int) -> None:
            if (rank, number) == (1, 3):
                raise Gone

        manager = CheckpointManager(tmp_path, every=2, asynchronous=True)
        loop = make_loop("replicated", disturb, checkpoint=manager)
        numbers = [number for number, _ in loop.run(STEPS)]
        manager.wait()
        return numbers, [kept.step for kept in manager.all()]

    results: list[Any] = run_ranks(3, program, return_exceptions=True)
    assert results[0] == results[2] == (list(range(STEPS)), [3, 4, 6])


def test_too_few_ranks_are_an_error() -> None:
    results = losses_with("replicated", 2, {0: 1}, min_ranks=2)
    assert isinstance(results[1], dist.DistBackendError)
    assert "1 of the ranks are left, and at least 2 are asked for" in str(results[1])


def test_a_program_s_own_error_is_raised() -> None:
    def program(rank: int) -> None:
        def disturb(number: int) -> None:
            raise KeyError("a bug")

        with pytest.raises(KeyError, match="a bug"):
            list(make_loop("replicated", disturb).run(1))

    run_ranks(2, program)


def test_fewer_copies_compute_again_what_was_lost() -> None:
    def program(rank: int) -> object:
        def disturb(number: int) -> None:
            if rank == 1 and number == 5:
                raise Gone

        loop = make_loop("replicated", disturb, every=2)
        results = list(loop.run(STEPS))
        # After step 1, which made the optimizer's states, and after 2, 4 and 6.
        assert loop.statistics()["snapshots"] == 4
        return results

    results: list[Any] = run_ranks(3, program, return_exceptions=True)
    numbers = [number for number, _ in results[0]]
    assert numbers == [0, 1, 2, 3, 4, 4, 5]
    assert dict(results[0]) == pytest.approx(dict(enumerate(undisturbed("replicated", STEPS))))


def test_a_state_of_something_else_is_refused() -> None:
    def program(rank: int) -> None:
        loop: Resilient[None] = Resilient(lambda: {"x": object()}, lambda state, number: None)
        with pytest.raises(TypeError, match=r"state\['x'\] is of type object"):
            list(loop.run(1))
        with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
            Resilient(dict, lambda state, number: None, replicas=0)

    run_ranks(2, program)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_processes_that_are_killed(kind: str) -> None:
    def program(rank: int) -> object:
        def disturb(number: int) -> None:
            if (rank, number) in ((0, 2), (3, 4)):
                os.kill(os.getpid(), signal.SIGKILL)

        loop = make_loop(kind, disturb)
        return [loss for _, loss in loop.run(STEPS)]

    results = run_ranks(4, program, kind="processes", return_exceptions=True)
    for rank in (1, 2):
        assert results[rank] == pytest.approx(undisturbed(kind, STEPS), rel=1e-4)


def test_a_loop_can_be_left_and_gone_on_with() -> None:
    def program(rank: int) -> object:
        loop = make_loop("sharded", lambda number: None)
        losses = []
        for _, loss in loop.run(STEPS):
            losses.append(loss)
            if len(losses) == 2:
                break
        losses += [loss for _, loss in loop.run(4)]
        loop.close()
        losses += [loss for _, loss in loop.run(STEPS)]
        loop.close()
        loop.close()
        return losses

    assert run_ranks(2, program)[0] == pytest.approx(undisturbed("sharded", STEPS), rel=1e-4)


def test_a_rank_lost_at_the_very_end() -> None:
    """Rank 1 ends when it has the last step; the others need it no more."""

    def program(rank: int) -> object:
        loop = make_loop("replicated", lambda number: None)
        numbers = []
        for number, _ in loop.run(STEPS):
            numbers.append(number)
            if rank == 1 and number == STEPS - 1:
                raise Gone
        dist.barrier()
        return numbers, dist.get_world_size()

    results: list[Any] = run_ranks(3, program, return_exceptions=True)
    assert results[0] == results[2] == (list(range(STEPS)), 2)


@pytest.mark.parametrize(("kind", "shared"), [*((kind, True) for kind in BUILDS), ("both", False)])
def test_a_newcomer_gets_its_part_of_the_state(kind: str, shared: bool) -> None:
    """Three ranks, of which rank 0 ends; a fourth thread takes its seat at the end of a step."""
    steps, limit, store = 40, timedelta(seconds=120), HashStore()

    def program(rank: int) -> object:
        world = current_world()

        def disturb(number: int) -> None:
            time.sleep(0.012)
            if rank == 0 and number == 3:
                raise Gone

        loop = make_loop(kind, disturb, shared=shared)
        if rank == 3:
            world.default_group = rejoin(world, store, 0, limit, None)
            world.default_group.successors = _SUCCESSORS
        else:
            dist.init_process_group("threads", store=store, rank=rank, world_size=3, timeout=limit)
        losses = dict(loop.run(steps))
        return losses, dist.get_rank(), [event.kind for event in loop.events]

    results: list[Any] = run_ranks(4, program, init=False, return_exceptions=True)
    expected = dict(enumerate(undisturbed(kind, steps)))
    assert isinstance(results[0], Gone)
    assert [result[1] for result in results[1:]] == [1, 2, 0]
    assert [result[2] for result in results[1:]] == [["started", "lost", "joined"]] * 2 + [
        ["joined"]
    ]
    for losses, _, _ in results[1:]:
        assert losses == pytest.approx({n: expected[n] for n in losses}, rel=1e-3)
    assert len(results[1][0]) == steps
    assert 0 < len(results[3][0]) < steps


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_lost_while_meshes_are_made(victim: int) -> None:
    """At the start, and again while the others build anew."""
    build = BUILDS["both"]

    def program(rank: int) -> object:
        counts = []

        def build_or_end() -> Any:
            counts.append(rank)
            if rank == victim or (rank == 1 and len(counts) == 2):
                raise Gone
            return build()

        loop = make_loop(build_or_end, lambda number: None)
        return [loss for _, loss in loop.run(STEPS)]

    results = run_ranks(4, program, return_exceptions=True)
    expected = pytest.approx(undisturbed("both", STEPS), rel=1e-4)
    left = [rank for rank in range(4) if rank not in (1, victim)]
    assert all(results[rank] == expected for rank in left), results
