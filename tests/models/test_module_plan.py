"""Modules that are none; names and wildcards of plans."""

from __future__ import annotations

import pytest
from torch import nn

from tests.tables import each
from tilework.models.module_plan import (
    check_is_module,
    close_names,
    is_pattern,
    matching_names,
    replace_module,
    split_name,
)

NAMES = ["", "up", "layers", "layers.0", "layers.0.up", "layers.1.up", "layers.10.up"]


@each(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("up", ["up"]),
        ("*.up", []),
        ("layers.*.up", ["layers.0.up", "layers.1.up", "layers.10.up"]),
        ("layers.?.up", ["layers.0.up", "layers.1.up"]),
        ("layers.[01].up", ["layers.0.up", "layers.1.up"]),
        ("LAYERS", []),
    ],
)
def test_matching_names(pattern: str, expected: list[str]) -> None:
    assert matching_names(pattern, NAMES) == expected


def test_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"fully_shard takes an nn\.Module, got int$"):
        check_is_module(3, "fully_shard")
    with pytest.raises(TypeError, match=r"got the class Linear: make one first, Linear\(…\)"):
        check_is_module(nn.Linear, "fully_shard")


def test_patterns() -> None:
    assert [is_pattern(name) for name in ("up", "u?", "*", "u[p]", "")] == [
        *(False, True, True, True, False)
    ]


def test_close_names() -> None:
    assert close_names("layer", NAMES)[0] == "layers"
    assert close_names("xyz", NAMES) == []


def test_split_name() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    module = nn.Sequential(inner)
    assert split_name(module, "0.0.weight") == (inner[0], "weight")
    assert split_name(module, "0") == (module, "0")


def test_a_wrapper_takes_every_place_but_its_own() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared)
    root = nn.Sequential(shared, nn.ReLU(), shared, inner)
    wrapper = nn.Sequential(shared)
    replace_module(root, shared, wrapper)
    assert root[0] is root[2] is inner[0] is wrapper
    assert wrapper[0] is shared
