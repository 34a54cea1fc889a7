"""The façade has torch.distributed's names; what it has not is listed here, with why."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch.distributed

import tilework.distributed as dist

#: Imported there, not of it.
IMPORTED = {"timedelta", "reduce_op", "config", "log"}
#: Of the engines, of compiled training, of elasticity: outside what the façade is for.
ELSEWHERE = {
    *("BuiltinCommHookType", "GradBucket", "Logger", "Reducer", "ProcessGroupGloo"),
    *("DeviceMesh", "init_device_mesh", "GroupName", "RankType", "QueueEmptyError"),
    *("record_comm", "breakpoint", "shrink_group", "split_group", "supports_complex"),
    *("is_torchelastic_launched", "is_xccl_available", "get_default_backend_for_device"),
    # Newer spellings of all_gather_into_tensor and reduce_scatter_tensor.
    *("all_gather_single", "reduce_scatter_single", "default_pg_timeout"),
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
