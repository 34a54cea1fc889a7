"""Whatever is in a file, readers and commands raise CheckpointError only."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.states import dtensor, numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, CheckpointManager, SaveOptions
from tilework.checkpoint.command import add_commands, run_command
from tilework.dtensor import Shard
from tilework.testing import run_ranks

EXAMPLES = int(os.environ.get("TILEWORK_MADE_UP_FILES", "25"))
examples = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, of what it finds in files
]
#: Becomes a number that JSON's grammar has and a float has not.
INFINITE = "@infinite@"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state in each format."""
    folder = tmp_path_factory.mktemp("good")

    def program(rank: int) -> None:
        state = {
            "weight": dtensor(numbers(8, 6), (2,), [Shard(0)]),
            "array": np.arange(3.0),
            "set": {1, (2, "b")},
            "rank": rank,
            "pairs": {1: torch.ones(2, dtype=torch.bfloat16), None: float("inf"), "k": 1 << 70},
        }
        meta = {"step": 3, "metrics": {"loss": 0.5}}
        checkpoint.save(state, folder / "step-00000003", SaveOptions(meta=meta))

    run_ranks(2, program)
    plain = {"a": numbers(8, 6), "b": {"c": torch.ones(3), "n": 3, "t": (1, torch.ones(1))}}
    torch.save(plain, folder / "state.pt")
    dcp: Any = torch_dcp
    dcp.save(plain, checkpoint_id=folder / "dcp", no_dist=True)
    checkpoint.convert(folder / "state.pt", folder / "one.safetensors")
    options = checkpoint.ConvertOptions(file_bytes=100)
    checkpoint.convert(folder / "state.pt", folder / "several", "safetensors", options)
    return folder


@contextlib.contextmanager
def copied(good: Path, name: str) -> Iterator[Path]:
    """A copy of one of them, with room beside it."""
    beside = good.parent / "copy"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    if (good / name).is_dir():
        shutil.copytree(good / name, beside / name)
    else:
        shutil.copy(good / name, beside / name)
    yield beside / name


def attempt(work: Callable[[], object]) -> None:
    with contextlib.suppress(CheckpointError), contextlib.redirect_stdout(io.StringIO()):
        work()


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run_command(parser.parse_args(words))


def read_by_all(path: Path, good: Path) -> None:
    state = {
        "weight": torch.zeros(8, 6),
        "array": np.zeros(3),
        "set": set(),
        "rank": 0,
        "pairs": {},
    }
    attempt(lambda: checkpoint.index_of(path))
    attempt(lambda: checkpoint.read(path))
    attempt(lambda: checkpoint.read(path, "pairs*"))
    attempt(lambda: checkpoint.verify(path))
    attempt(lambda: checkpoint.show(path))
    attempt(lambda: checkpoint.diff(path, good / "step-00000003"))
    attempt(lambda: checkpoint.load(path, into=state))
    attempt(lambda: CheckpointManager(path.parent).all())
    attempt(lambda: CheckpointManager(path.parent).resume(into=state, strict=False))
    for words in (("show", path), ("verify", path), ("diff", path, good / "step-00000003")):
        assert command(*map(str, words)) in (0, 1, 2)
    convert_to_all(path)


def convert_to_all(path: Path) -> None:
    for target, kind in (("t", "tilework"), ("s", "safetensors"), ("d", "dcp"), ("p.pt", "torch")):
        attempt(partial(checkpoint.convert, path, path.parent / target, kind))
    assert command("convert", str(path), str(path.parent / "c")) in (0, 2)


# -- made-up values ------------------------------------------------------------------------------

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from(
        [1 << 20, 1 << 31, 1 << 53, (1 << 62) + 16, (1 << 63) - 1, 1 << 64, -(1 << 63)]
    ),
    st.sampled_from([0.5, 1e308, INFINITE]),
    st.sampled_from(
        ["", "x", "weight", "F32", "BF16", "../x", "/etc/passwd", "\ud800", "1" * 5000]
    ),
)
kinds = st.sampled_from(
    [
        *("tensor", "int", "float", "complex", "bytes", "tuple", "set", "numpy", "dict"),
        *("per_rank", "dtype", "device", "nothing"),
    ]
)
values: Any = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "weight", "$", "v"]), inner, max_size=2),
        st.builds(lambda kind, value: {"$": kind, "v": value}, kinds, inner),
        st.builds(
            lambda value: {"$": "per_rank", "v": [{"ranks": [0], "v": value}]},
            inner,
        ),
    ),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """All that can be replaced in JSON: what it is in, and the key."""
    if not isinstance(value, dict | list):
        return []
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(value, key) for key, _ in pairs] + [
        place for _, inner in pairs for place in places(inner)
    ]


def changed(listed: Any, data: st.DataObject) -> str:
    """The text of JSON of which one or two values are others."""
    for _ in range(data.draw(st.integers(1, 2))):
        inside, key = data.draw(st.sampled_from(places(listed)))
        if data.draw(st.integers(0, 5)):
            inside[key] = data.draw(values)
        elif isinstance(inside, dict):
            del inside[key]
        else:
            inside.append(inside[key])
        if not places(listed):
            break
    return json.dumps(listed).replace(f'"{INFINITE}"', "1e999")


def sealed(text: str) -> bytes:
    """An index with its checksum."""
    begun = text.encode().rstrip()[:-1]
    return begun + b',\n"crc32": %d\n}\n' % zlib.crc32(begun)


# -- the properties ------------------------------------------------------------------------------


@examples
@given(st.data())
def test_an_index_of_any_contents(good: Path, data: st.DataObject) -> None:
    with copied(good, "step-00000003") as path:
        listed = json.loads((path / "index.json").read_bytes())
        del listed["crc32"]
        (path / "index.json").write_bytes(sealed(changed(listed, data)))
        read_by_all(path, good)


@examples
@given(st.data())
def test_a_header_of_safetensors_of_any_contents(good: Path, data: st.DataObject) -> None:
    with copied(good, "one.safetensors") as path:
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        text = changed(json.loads(whole[8 : 8 + length]), data).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        convert_to_all(path)


@examples
@given(st.data())
def test_an_index_of_safetensors_of_any_contents(good: Path, data: st.DataObject) -> None:
    with copied(good, "several") as path:
        index = path / "model.safetensors.index.json"
        index.write_text(changed(json.loads(index.read_bytes()), data))
        convert_to_all(path)


@examples
@given(st.data())
def test_metadata_of_dcp_of_any_contents(good: Path, data: st.DataObject) -> None:
    with copied(good, "dcp") as path:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        objects = [metadata, *metadata.state_dict_metadata.values()]
        objects += [*metadata.storage_data.values(), *metadata.storage_data]
        for item in metadata.state_dict_metadata.values():
            objects += [item.properties, *item.chunks] if hasattr(item, "chunks") else []
        for _ in range(data.draw(st.integers(1, 3))):
            each = data.draw(st.sampled_from(objects))
            if vars(each):
                name = data.draw(st.sampled_from(sorted(vars(each))))
                shape = st.lists(plain, max_size=3).map(tuple)
                object.__setattr__(each, name, data.draw(st.one_of(values, shape)))
        with contextlib.suppress(TypeError, RuntimeError):  # of what torch itself does not pickle
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
        convert_to_all(path)


@examples
@given(st.data())
def test_files_that_are_damaged_anywhere(good: Path, data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(["step-00000003", "dcp", "state.pt", "one.safetensors", "several"])
    )
    with copied(good, name) as path:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        file = data.draw(st.sampled_from(files))
        whole = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(whole) - 1))
            whole[at] = data.draw(st.integers(0, 255))
        file.write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole) // 2, 9, 0]))])
        if name == "step-00000003":
            read_by_all(path, good)
        else:
            convert_to_all(path)
