"""The façade has torch.distributed's names; what it has not is listed here, with why."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch.distributed

import tilework.distributed as dist
from tilework.from_torch import LEFT_OUT

#: Imported there, not of it.
IMPORTED = {"timedelta", "reduce_op", "config", "log"}
#: Of the engines, of compiled training: outside what the façade is for.
ELSEWHERE = {
    *("BuiltinCommHookType", "GradBucket", "GroupName", "RankType"),
    *(name for row in LEFT_OUT if row.package == "tilework.distributed" for name in row.names),
}


def _names() -> list[str]:
    found = {name: getattr(torch.distributed, name) for name in dir(torch.distributed)}
    # Which sub-modules are there depends on what was imported before.
    public = [n for n, thing in found.items() if n[0] != "_" and type(thing) is not ModuleType]
    classes = [name for name in public if name.endswith("Work")]
    mine = IMPORTED | ELSEWHERE
    return sorted({*public, *classes} - mine)


@pytest.mark.parametrize("name", _names())
def test_name_is_there(name: str) -> None:
    assert hasattr(dist, name)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in _names()
        if inspect.isfunction(getattr(torch.distributed, name)) and hasattr(dist, name)
    ],
)
def test_arguments_have_the_same_names_in_the_same_order(name: str) -> None:
    theirs = list(inspect.signature(getattr(torch.distributed, name)).parameters)
    ours = list(inspect.signature(getattr(dist, name)).parameters)
    known = [parameter for parameter in theirs if parameter in ours and parameter != "kwargs"]
    assert ours[: len(known)] == known


def test_what_seeds_use_with_an_underscore_is_public() -> None:
    for name in (
        "store_based_barrier",
        "get_default_store",
        "get_default_group",
        "rank_not_in_group",
        "make_premul_sum",
        "coalescing_manager",
    ):
        assert callable(getattr(dist, name))


def test_everything_public_is_documented() -> None:
    for name in dist.__all__:
        thing = getattr(dist, name)
        if callable(thing):
            assert inspect.getdoc(thing), name
