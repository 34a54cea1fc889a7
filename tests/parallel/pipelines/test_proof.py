"""Illegal orders raise at construction, and legal orders end on every engine."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from tests.parallel.pipelines.orders import (
    Rows,
    before,
    ends_on_a_strict_engine,
    legal_rows,
    random_case,
)
from tilework.parallel.pipelines.schedule import Action, Schedule


def test_legal_orders_are_accepted_and_end_on_the_strictest_engine() -> None:
    for seed in range(1000):
        assert ends_on_a_strict_engine(Schedule.of_actions(legal_rows(seed))), seed


def test_random_orders_raise_if_and_only_if_they_have_a_circle() -> None:
    raised = 0
    for seed in range(1000):
        rng, home, actions = random_case(seed, split=True)
        rows: list[list[Action]] = [[] for _ in range(max(home) + 1)]
        # Most pairs stay in order: an order of chance alone is nearly always wrong on one rank.
        late = {a: place + rng.uniform(0, 6) for place, a in enumerate(_in_order(actions))}
        for action in sorted(actions, key=lambda each: late[each]):
            rows[home[action.stage]].append(action)
        if _has_circle(rows, len(home)):
            raised += 1
            with pytest.raises(ValueError, match=r"wait for each other in a circle|for itself"):
                Schedule.of_actions(rows)
        else:
            Schedule.of_actions(rows)
    assert 100 < raised < 900


def _in_order(actions: list[Action]) -> list[Action]:
    stages = 1 + max(a.stage for a in actions)
    graph = {action: set(before(action, stages)) for action in actions}
    return list(TopologicalSorter(graph).static_order())


def _has_circle(rows: Rows, stages: int) -> bool:
    graph = {action: set(before(action, stages)) for row in rows for action in row}
    for row in rows:
        for first, second in pairwise(row):
            graph[second].add(first)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def test_the_error_is_the_circle_in_words() -> None:
    with pytest.raises(ValueError, match=r"^ranks") as caught:
        Schedule.parse("rank 0 F0 F1 B0 B1\nrank 1 F1 B1 F0 B0\nrank 2 F0 B0 F1 B1")
    lines = str(caught.value).splitlines()
    assert lines[0] == "ranks 1, 2 wait for each other in a circle, and none can continue:"
    assert lines[1:3] == [
        "  rank 1 waits in action 1, backward of microbatch 1 in stage 1, for rank 2, which has"
        " not done backward of microbatch 1 in stage 2",
        "  rank 2 waits in action 0, forward of microbatch 0 in stage 2, for rank 1, which has"
        " not done forward of microbatch 0 in stage 1",
    ]


def test_a_backward_before_the_forward_is_named() -> None:
    with pytest.raises(ValueError, match=r"rank 0 waits for itself, and.*\n.*forward"):
        Schedule.parse("rank 0 B0 F0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank 0 F0 F1 B0", "but backward of microbatch 1 in stage 0 is missing"),
        ("rank 0 F0 F0 B0", "forward of microbatch 0 in stage 0 is there 2 times"),
        ("rank 0 F0 I0", "weights of microbatch 0 in stage 0 is missing"),
        ("rank 0 F0 B0 W0", "weights of microbatch 0 in stage 0 is there beside backward"),
        ("rank 0 0F0 0B0\nrank 1 1F0 1B0 0F1 0B1", "rank 0: .* are on rank 1: all actions"),
        ("rank 0 0F0 0B0 2F0 2B0", "got stages 0, 2; expected all numbers from 0 on"),
        ("rank 0 F0 B0\nrank 1", "rank 1 has no action: give it a stage"),
        ("rank 0 G F0 X B0", "action 3: backward .* the parameters are not gathered"),
        ("rank 0 F0 G B0 X", "action 0: forward .* the parameters are not gathered"),
        ("rank 0 X F0 B0", "action 0: free in stage 0: the parameters are not gathered"),
        ("rank 0 G G F0 B0", "action 1: gather in stage 0: the parameters are gathered already"),
        ("rank 0 F0 R B0", "action 2: backward .* the gradients are reduced already"),
        ("rank 0 F0 B0 R R", "action 3: reduce .* the gradients are reduced already"),
        ("rank 0 F0 R0 B0", "reduce in stage 0: got microbatch 0; expected -1"),
    ],
)
def test_incomplete_orders_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.compile(words)):
        Schedule.parse(text)


def test_receives_are_posted_ahead_where_sends_would_wait_for_each_other() -> None:
    plan = Schedule.parse("rank 0 F0 F1 B0 B1\nrank 1 F0 B0 F1 B1")
    step = plan.steps(1)[1]
    # Before the gradient of microbatch 0 is sent, rank 0 may wait in the send of microbatch 1.
    assert [m.used_by for m in step.receives] == [Action("forward", 1, 1)]
    assert step.sends is not None
    assert step.sends.used_by == Action("backward", 0, 0)
    assert plan.lookahead == (0, 1)
