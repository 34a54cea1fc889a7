"""Schedules: the bubble and the memory of theory, text and back, torch's tables, bad input."""

from __future__ import annotations

import copy
import pickle
import random
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from tilework.parallel.pipelines.schedule import Action, Schedule, StageCost

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 9, 16, 24)]

MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": Schedule.gpipe,
    "gpipe of 2": lambda p, m: Schedule.gpipe(p, m, stages_per_rank=2),
    "1F1B": Schedule.one_forward_one_backward,
    "interleaved": Schedule.interleaved,
    "interleaved 3": lambda p, m: Schedule.interleaved(p, m, 3),
    "H1": Schedule.zero_bubble,
    "H2": lambda p, m: Schedule.zero_bubble(p, m, "H2"),
    "v": Schedule.v,
}


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_has_the_bubble_and_memory_of_theory(p: int, m: int) -> None:
    plan = Schedule.gpipe(p, m)
    assert plan.bubble == (p - 1) / (m + p - 1)
    assert plan.peak_activations == (m,) * p
    assert len(plan.messages) == 2 * m * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_has_the_bubble_and_memory_of_theory(p: int, m: int) -> None:
    plan = Schedule.one_forward_one_backward(p, m)
    assert plan.bubble == (p - 1) / (m + p - 1)
    assert plan.peak_activations == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_interleaved_has_the_bubble_and_memory_of_theory(p: int, m: int, v: int) -> None:
    plan = Schedule.interleaved(p, m, v)
    assert plan.bubble == (p - 1) / (v * m + p - 1)
    largest_round = -(-m // (m // p))
    most = [2 * (p - r - 1) + (v - 1) * largest_round + 1 for r in range(p)]
    assert plan.peak_activations == tuple(min(v * m, each) for each in most)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zero_bubble_has_the_bubble_and_memory_of_theory(p: int, m: int) -> None:
    first, second = Schedule.zero_bubble(p, m), Schedule.zero_bubble(p, m, "H2")
    assert first.bubble == (p - 1) / (3 * m + p - 1)
    assert first.peak_activations == (p,) * p
    assert max(second.peak_activations) <= 2 * p - 1
    if m >= 2 * p - 1:
        assert second.bubble == 0


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_v_is_at_least_as_good_as_torchs(p: int, m: int) -> None:
    plan = Schedule.v(p, m)
    theirs = Schedule.from_torch(of_torch("ScheduleZBVZeroBubble", p, m, 2))
    assert plan.home == theirs.home
    assert plan.bubble <= theirs.bubble
    assert plan.duration <= theirs.duration
    assert max(plan.peak_activations) <= 2 * p
    if m >= 2 * p:
        assert plan.bubble == 0


def of_torch(name: str, p: int, m: int, v: int) -> object:
    """A schedule of torch, which takes more from stages only when it runs."""
    stages = [
        SimpleNamespace(
            group_size=p, group_rank=0, num_stages=p * v, submod=torch.nn.Identity(), is_last=False
        )
        for _ in range(v)
    ]
    made: object = getattr(torch_schedules, name)(stages if v > 1 else stages[0], m)
    return made


@pytest.mark.parametrize("name", MAKERS)
def test_text_says_all(name: str) -> None:
    for p, m in ((1, 1), (2, 1), (3, 2), (4, 9)):
        plan = MAKERS[name](p, m)
        for each in (plan, plan.with_sharding(1), plan.with_sharding()):
            assert Schedule.parse(str(each)) == each
            assert pickle.loads(pickle.dumps(each)) == copy.copy(each) == each
            assert len({each, Schedule.of_actions(each.actions)}) == 1


def test_text_is_ranks_by_time() -> None:
    plan = Schedule.v(2, 2)
    assert str(plan) == (
        "2 ranks, 4 stages, 2 microbatches: bubble 0.0769, live activations 4 4, 8 messages\n"
        "time    0    1    2    3    4    5    6    7    8    9    10   11   12\n"
        "rank 0  0F0  0F1  .    3F0  3I0  3F1  3I1  0I0  3W0  0I1  0W0  3W1  0W1\n"
        "rank 1  .    1F0  2F0  1F1  2F1  2I0  1I0  2I1  1I1  2W0  1W0  2W1  1W1"
    )


@pytest.mark.parametrize("name", MAKERS)
def test_uneven_stages_are_never_slower_than_in_the_order_for_even_stages(name: str) -> None:
    rng = random.Random(name)
    for _ in range(6):
        p, m = rng.randint(1, 5), rng.randint(1, 9)
        even = MAKERS[name](p, m)
        costs = [[rng.choice((0.1, 1, 2, 3.7)) for _ in range(3)] for _ in range(even.stages)]
        kept = Schedule.of_actions(even.actions, costs=[StageCost(*each) for each in costs])
        planned = _with_costs(name, p, m, kept.costs)
        assert planned.duration <= kept.duration
        assert Schedule.parse(str(planned)) == planned != even


def _with_costs(name: str, p: int, m: int, costs: tuple[StageCost, ...]) -> Schedule:
    if name.startswith("gpipe"):
        return Schedule.gpipe(p, m, stages_per_rank=len(costs) // p, costs=costs)
    if name.startswith("inter"):
        return Schedule.interleaved(p, m, len(costs) // p, costs=costs)
    if name.startswith("H"):
        return Schedule.zero_bubble(p, m, "H1" if name == "H1" else "H2", costs=costs)
    maker = Schedule.v if name == "v" else Schedule.one_forward_one_backward
    return maker(p, m, costs=costs)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("live", [[2, 3, 2], [4, 4, 3], 3, [9, 9, 9]])
def test_own_limits_of_memory_are_kept(live: int | list[int], split: bool) -> None:
    home, most = [0, 1, 2, 1, 2, 1, 0], [live] * 3 if isinstance(live, int) else live
    plan = Schedule.of_costs(home, 7, [(1, 1, 1)] * 7, live=live, split=split)
    assert all(peak <= each for peak, each in zip(plan.peak_activations, most, strict=True))


def test_a_limit_below_the_stages_of_a_rank_is_refused() -> None:
    words = "live: got 2; expected at least 3, since a microbatch lives in all 3 stages of rank 1"
    with pytest.raises(ValueError, match=words):
        Schedule.of_costs([0, 1, 1, 1], 2, (), live=[1, 2])


@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("ScheduleGPipe", 1),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_torchs_schedules_are_read(name: str, v: int, tmp_path: Path) -> None:
    theirs = of_torch(name, 2, 4, v)
    order = theirs.pipeline_order  # type: ignore[attr-defined]
    plan = Schedule.from_torch(theirs)
    assert (plan.ranks, plan.stages, plan.microbatches) == (2, 2 * v, 4)
    lines = [",".join("" if a is None else str(a) for a in order[rank]) for rank in range(2)]
    (tmp_path / "order.csv").write_text("\n".join(lines))
    assert Schedule.from_torch(tmp_path / "order.csv") == Schedule.from_torch(order) == plan


def test_torchs_tables_with_messages_and_gathers_are_read() -> None:
    theirs = of_torch("ScheduleInterleaved1F1B", 2, 4, 2)
    plan = Schedule.from_torch(theirs.pipeline_order_with_comms)  # type: ignore[attr-defined]
    kinds = {action.kind for row in plan.actions for action in row}
    assert kinds == {"gather", "free", "reduce", "forward", "backward"}
    assert plan.messages == Schedule.from_torch(theirs).messages


def test_torchs_own_table_of_1f1b_is_illegal() -> None:
    with pytest.raises(ValueError, match="forward of microbatch 4 in stage 0 is missing"):
        Schedule.from_torch(of_torch("Schedule1F1B", 2, 4, 1))


def test_sharding_gathers_ahead_and_reduces_once() -> None:
    plan = Schedule.interleaved(2, 2).with_sharding()
    for row, plain in zip(plan.actions, Schedule.interleaved(2, 2).actions, strict=True):
        assert [a for a in row if a.microbatch >= 0] == list(plain)
        assert sorted(a.stage for a in row if a.kind == "reduce") == sorted({a.stage for a in row})
    # The next stage is gathered before the action that precedes the first use.
    kinds = [str(action) for action in plan.actions[0][:4]]
    assert kinds == ["0G", "0F0", "2G", "0F1"]


@pytest.mark.parametrize("name", MAKERS)
def test_a_picture_has_each_action(name: str, tmp_path: Path) -> None:
    plan = MAKERS[name](2, 3)
    plan.timeline(tmp_path / "plan.svg")
    drawn = ET.parse(tmp_path / "plan.svg").getroot()
    told = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(filter(None, told)) == sorted(a.words for row in plan.actions for a in row)
    assert "<svg" in plan._repr_html_()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule.gpipe(0, 1), "ranks: got 0; expected a whole number from 1 on"),
        (lambda: Schedule.gpipe(2, -1), "microbatches: got -1; expected a whole number"),
        (lambda: Schedule.v(2, 2.0), "microbatches: got 2.0; expected a whole number"),  # type: ignore[arg-type]
        (lambda: Schedule.interleaved(2, 2, 0), "stages_per_rank: got 0; expected a whole"),
        (lambda: Schedule.zero_bubble(2, 2, "H3"), 'got \'H3\'; expected "H1" or "H2"'),  # type: ignore[arg-type]
        (lambda: Schedule.gpipe(2, 2, costs=[(1, 1, 1)]), "those of 1 stages; expected 2"),
        (lambda: Schedule.gpipe(1, 2, costs=[(1, -1, 1)]), "finite, none below 0"),
        (lambda: Schedule.gpipe(2, 2).steps(-1), "rank: got -1; expected 0 to 1"),
        (lambda: Schedule.gpipe(1, 2, costs=[3]), "expected for each stage the times"),  # type: ignore[list-item]
        (lambda: Schedule.of_costs([0, 2], 2, ()), r"home: got \[0, 2\]; expected the rank"),
        (lambda: Schedule.of_costs([0, 1], 2, (), live=[1]), "live: got 1 limits for 2 ranks"),
        (lambda: Schedule.of_actions([]), "actions: got none; expected a sequence of actions"),
        (lambda: Schedule.of_actions([[("send", 0, 0)]]), "of kind 'send'; expected forward,"),  # type: ignore[list-item]
        (lambda: Schedule.of_actions([["0F0"]]), "got the action '0F0'; expected Action"),  # type: ignore[list-item]
        (lambda: Schedule.parse("rank 0 F0 Q1"), "rank 0: got 'Q1'; expected a letter of F B I"),
        (lambda: Schedule.parse(""), r"actions of ranks \[\]; expected a line for each rank"),
        (lambda: Schedule.parse("rank 0 F0 B0\nRank 1 F0"), "got the line 'Rank 1 F0'; expected"),
        (lambda: Schedule.parse("rank 0 F0 B0\nrank 0 F0 B0"), "a number that no other line has"),
        (lambda: Schedule.parse("2 ranks, 1 stage\nrank 0 F0 B0"), r"actions of ranks \[0\];"),
        (lambda: Schedule.parse("rank 0 F0 B0 F1000000000"), "forward .* 1 in stage 0 is missing"),
        (lambda: Schedule.of_actions({0: []}), "actions: got dict; expected a sequence"),  # type: ignore[arg-type]
        (lambda: Schedule.of_costs([0, 1.0], 2, ()), r"home: got \[0, 1.0\]"),  # type: ignore[list-item]
        (lambda: Schedule.of_costs([0], 2, (), live=2.5), "live: got 2.5; expected a whole number"),  # type: ignore[arg-type]
        (lambda: Schedule.parse("rank 1 F0 B0"), r"actions of ranks \[1\]; expected a line"),
        (lambda: Schedule.from_torch(3), "order: got int; expected a schedule with"),
        (lambda: Schedule.from_torch({0: ["0Z1"]}), "got the action '0Z1'; expected torch's form"),
    ],
)
def test_bad_input_is_named(make: Callable[[], Schedule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_schedule_is_a_value_of_any_sequence() -> None:
    plan = Schedule([0], 1, [[Action("forward", 0, 0), Action("backward", 0, 0)]])  # type: ignore[arg-type]
    assert plan == Schedule.gpipe(1, 1)
    assert hash(plan) == hash(Schedule.gpipe(1, 1))
