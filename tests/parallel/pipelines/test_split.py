"""Splits of models by names, evenly, by time and by plans."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.parallel.pipelines.models import Listed
from tilework.parallel.pipelines.split import Split, names_of_cuts, split_model


def stages_by_unit(how: Any, stages: int, model: nn.Module | None = None, **times: float) -> Any:
    model = Listed() if model is None else model
    return split_model(model, names_of_cuts(model, how, stages, lambda: times)).units


def test_names_open_stages() -> None:
    units = stages_by_unit(["layers.2", "layers.5.down"], 3)
    assert (units["first"], units["layers.1"], units["layers.2"]) == (0, 0, 1)
    assert (units["layers.5.up"], units["layers.5.down"], units["last"]) == (1, 2, 2)


@pytest.mark.parametrize("how", ["even", {"first": [], "layers": [], "last": []}])
def test_the_longest_chain_is_cut_evenly(how: Any) -> None:
    units = stages_by_unit(how, 3)
    assert [units[f"layers.{number}"] for number in range(8)] == [0, 0, 1, 1, 1, 2, 2, 2]


def test_the_chain_with_the_most_modules_to_share_is_cut() -> None:
    model = nn.Sequential(nn.Embedding(9, 9), Listed(), nn.Linear(1, 1))
    model[0].tables = nn.ModuleList(nn.Embedding(99, 99) for _ in range(3))
    assert names_of_cuts(model, "even", 2, dict) == ["1.layers.4"]


def test_times_make_the_slowest_stage_fast() -> None:
    times = {f"layers.{number}": 1.0 + 2 * (number == 7) for number in range(8)}
    cuts = names_of_cuts(Listed(), "by time", 3, lambda: times)
    sizes = [int(cut.rpartition(".")[2]) for cut in cuts]
    assert max(sizes[0], sizes[1] - sizes[0], 10 - sizes[1]) == 4


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (["first"], "splits nothing"),
        (["layers.9"], "no module of that name"),
        (["layers.1", "layers.1"], "begin at the same place"),
        (["layers", "layers.0"], "begin at the same place"),
        (["last", "layers.1"], None),
    ],
)
def test_names_that_split_nothing_or_twice_are_refused(how: list[str], text: str | None) -> None:
    if text is None:
        assert set(stages_by_unit(how, 3).values()) == {0, 1, 2}
        return
    with pytest.raises(ValueError, match=text):
        stages_by_unit(how, len(how) + 1)


def test_as_many_names_as_cuts_are_needed() -> None:
    with pytest.raises(ValueError, match="makes 2 parts, and the schedule has 4 stages"):
        stages_by_unit(["layers.1"], 4)
    with pytest.raises(ValueError, match="only 2 modules"):
        stages_by_unit("even", 3, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))


def test_one_module_on_both_sides_is_refused() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="0 and 2 are one module, on both sides"):
        stages_by_unit(["1"], 2, nn.Sequential(layer, nn.Linear(1, 1), layer))


def test_a_split_names_the_modules_of_each_stage() -> None:
    split = Split(2, frozenset([""]), {"a": 0, "l.0": 1, "l.1": 1}, {})
    assert str(split) == "stage 0: a\nstage 1: l.0 to l.1"
