"""States of any values and containers: what is saved can be read, loaded, and opened by others."""

from __future__ import annotations

import enum
import tempfile
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.states import dtensor, numbers
from tests.wrapper import Wrapper
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, SaveOptions
from tilework.dtensor import Shard
from tilework.testing import run_ranks


class Mode(str, enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


texts = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["__metadata__", "a.b", "x[0:2]", "$", "", "\ud800", "x~2", "state"]
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.binary(max_size=9),
    texts,
    st.sampled_from([Mode.FAST, Level.HIGH, torch.bfloat16, 2 - 1j]),
)
keys = texts | st.integers(-(2**70), 2**70) | st.none() | st.booleans()
in_sets = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=4,
)
tensors = st.integers(0, 3).map(lambda size: torch.arange(size, dtype=torch.int16))
states = st.recursive(
    values | tensors | st.sets(in_sets, max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """The value with lists in the place of tensors, to be compared."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


@given(states, states)
@settings(deadline=None, max_examples=80)
def test_what_is_saved_is_read_and_loaded_and_opened(state: Any, other: Any) -> None:
    whole = {"state": state, "__metadata__": other}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(whole, folder)
        assert plain(checkpoint.read(folder)) == plain(whole)
        assert checkpoint.verify(folder) == []
        for file in Path(folder).glob("*.safetensors"):
            load_file(file)
        report = checkpoint.load(folder, into=whole)
        assert not report.missing
        assert not report.unused


def test_names_that_look_like_boxes(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        rows = dtensor(numbers(8), (2,), [Shard(0)])
        checkpoint.save({"w": rows, "w[0:4]": torch.ones(4)}, tmp_path)

    run_ranks(2, save)
    assert checkpoint.verify(tmp_path) == []
    found = checkpoint.read(tmp_path)
    assert found["w"].equal(numbers(8))
    assert found["w[0:4]"].equal(torch.ones(4))
    keys = [key for file in tmp_path.glob("*.safetensors") for key in load_file(file)]
    assert sorted(keys) == ["w[0:4]", "w[0:4]~2", "w[4:8]"]


def test_numbers_of_numpy(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    state = {"losses": [numpy.float64(1.5), numpy.float32(2)], "mixed": [1, numpy.int64(2)]}
    checkpoint.save(state, tmp_path)
    assert checkpoint.load(tmp_path, into=state).missing == []
    assert state == {"losses": [1.5, 2.0], "mixed": [1, 2]}
    with pytest.raises(TypeError, match="x is of type longdouble"):
        checkpoint.save({"x": numpy.longdouble(1)}, tmp_path)


def test_arrays_that_torch_has_no_tensors_of(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    backwards, foreign = numpy.arange(3)[::-1], numpy.arange(3, dtype=">i4")
    checkpoint.save({"backwards": backwards, "foreign": foreign}, tmp_path)
    into = {"backwards": numpy.zeros(6, int)[::-2], "foreign": numpy.zeros(3, ">i4")}
    arrays = dict(into)
    checkpoint.load(tmp_path, into=into)
    assert arrays["backwards"].tolist() == [2, 1, 0]
    assert arrays["foreign"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"x is an array of numpy's of dtype <U1"):
        checkpoint.save({"x": numpy.array(["a"])}, tmp_path)


def test_an_array_that_must_not_be_written_is_replaced(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    checkpoint.save({"x": numpy.arange(3)}, tmp_path)
    constant = numpy.zeros(3, int)
    constant.flags.writeable = False
    state = {"x": constant}
    checkpoint.load(tmp_path, into=state)
    assert state["x"].tolist() == [0, 1, 2]
    assert constant.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", [MappingProxyType, UserDict, ChainMap, OrderedDict])
def test_mappings_of_any_kind_are_filled(tmp_path: Path, kind: Any) -> None:
    checkpoint.save({"m": kind({"w": torch.ones(2), "n": 3})}, tmp_path)
    w = torch.zeros(2)
    state = checkpoint.load(tmp_path, into={"m": kind({"w": w, "n": 0})}).state
    assert w.tolist() == [1, 1]
    assert state["m"]["w"] is w
    assert state["m"]["n"] == 3


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: {nn.Linear(1, 1)}, "a set with an object whose state is a OrderedDict"),
        (lambda: 10**5000, "an integer of 16,610 bits"),
        (lambda: nn.LazyLinear(3), "is not initialised"),
    ],
)
def test_what_could_not_be_read_is_not_saved(
    tmp_path: Path, make: Callable[[], Any], problem: str
) -> None:
    checkpoint.save({"x": 1}, tmp_path)
    with pytest.raises(TypeError, match=problem):
        checkpoint.save({"x": make()}, tmp_path)
    assert checkpoint.read(tmp_path) == {"x": 1}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "meta", [{1: 1, "1": 2}, nested(250), {"x": float("nan")}, {"x": object()}, [1], None]
)
def test_meta_that_no_index_has_is_refused(tmp_path: Path, meta: Any) -> None:
    checkpoint.save({"x": 1}, tmp_path)
    with pytest.raises((TypeError, ValueError), match="meta must be"):
        checkpoint.save({"x": 2}, tmp_path, SaveOptions(meta=meta))
    assert checkpoint.read(tmp_path) == {"x": 1}


def test_sizes_of_files(tmp_path: Path) -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="file_bytes must be a number of bytes, 1 or more"):
            SaveOptions(file_bytes=wrong)  # type: ignore[arg-type]

    def save(rank: int) -> None:
        rows = dtensor(numbers(400), (2,), [Shard(0)])
        checkpoint.save({"x": rows}, tmp_path, SaveOptions(file_bytes=400 + 100 * rank))

    run_ranks(2, save)  # that of the first rank counts
    assert checkpoint.read(tmp_path)["x"].equal(numbers(400))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.zeros(1).expand(4), "expanded"),
        (lambda: torch.zeros(4, device="meta"), "on the device 'meta'"),
        (lambda: torch.zeros(4).to_sparse(), "not dense"),
        (lambda: nn.UninitializedParameter(), "not initialised"),
        (Wrapper, "a Wrapper without memory"),
    ],
)
def test_tensors_without_room_of_their_own_are_told_on_all_ranks(
    tmp_path: Path, make: Callable[[], torch.Tensor], problem: str
) -> None:
    checkpoint.save({"x": numbers(4)}, tmp_path)
    own = torch.zeros(4)

    def load(rank: int) -> None:
        with pytest.raises(CheckpointError, match=f"rank 1: x cannot be filled: it is .*{problem}"):
            checkpoint.load(tmp_path, into={"x": make() if rank == 1 else own})

    run_ranks(2, load)
    assert not own.any()
