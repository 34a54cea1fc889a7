"""Indexes that somebody made up: refused before memory is taken or a file is opened."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.states import numbers
from tilework import checkpoint
from tilework.checkpoint import CheckpointError
from tilework.checkpoint.format import Index, Part, SavedFile, SavedTensor
from tilework.checkpoint.index_text import index_text, parse_index
from tilework.layout.box import whole_box


def sealed(body: Any) -> bytes:
    """The text of an index with a checksum that is right."""
    body.pop("crc32", None)
    text = json.dumps(body).encode()[:-1]
    return text + b',\n"crc32": %d\n}\n' % zlib.crc32(text)


def saved(folder: Path) -> Any:
    checkpoint.save({"x": numbers(6, 4), "y": numbers(3), "n": 1}, folder)
    return json.loads((folder / "index.json").read_text())


def part(body: Any) -> Any:
    return body["tensors"]["x"]["parts"][0]


def other_file(name: str) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        (old,) = body["files"]
        body["files"][name] = body["files"].pop(old)
        for tensor in body["tensors"].values():
            tensor["parts"][0]["file"] = name

    return change


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("only plain names in its own folder", other_file("/etc/passwd")),
    ("only plain names in its own folder", other_file("../x.safetensors")),
    ("only plain names in its own folder", other_file("a..b")),
    ("only plain names in its own folder", other_file(".hidden")),
    ("only plain names in its own folder", other_file("a/b.safetensors")),
    ("only plain names in its own folder", other_file("a\x00b")),
    ("which is not among the files", lambda b: part(b).update(file="other")),
    ("bytes instead of", lambda b: part(b).update(bytes=97)),
    ("ends at byte", lambda b: part(b).update(begin=10**9)),
    ("not an integer", lambda b: part(b).update(begin=-8)),
    ("not an integer", lambda b: part(b).update(begin=1.5)),
    ("not an integer", lambda b: part(b).update(begin=True)),
    ("too large", lambda b: b["tensors"]["x"].update(shape=[1 << 40, 1 << 40])),
    ("do not cover", lambda b: b["tensors"]["x"].update(shape=[7, 4])),
    ("overlap", lambda b: b["tensors"]["x"]["parts"].append(part(b))),
    ("do not cover", lambda b: b["tensors"]["x"].update(parts=[])),
    ("checksums instead of", lambda b: part(b).update(crc32=[])),
    ("more than 32 bits", lambda b: part(b).update(crc32=[1 << 32])),
    ("the number NaN is not JSON", lambda b: b.update(meta={"loss": float("nan")})),
    ("the number -Infinity is not JSON", lambda b: b["state"].update(n=-float("inf"))),
    ("is not known", lambda b: b["tensors"]["x"].update(dtype="OBJECT")),
    ("shares bytes", lambda b: b["tensors"]["y"]["parts"][0].update(begin=part(b)["begin"] + 4)),
    ("has version 2 of the format", lambda b: b.update(version=2)),
    ("its format is not", lambda b: b.update(format="other")),
    ("not as docs/format.md says", lambda b: b.pop("files")),
    ("not as docs/format.md says", lambda b: b.update(tensors=[1])),
    ("not as docs/format.md says", lambda b: b.update(chunk_bytes=0)),
    ("is 7, not a multiple of 16", lambda b: b.update(chunk_bytes=7)),
]


@pytest.mark.parametrize(("message", "change"), CHANGES)
def test_made_up_indexes_are_refused(
    tmp_path: Path, message: str, change: Callable[[Any], Any]
) -> None:
    body = saved(tmp_path)
    change(body)
    (tmp_path / "index.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match=message) as info:
        checkpoint.read(tmp_path)
    assert info.value.file.endswith("index.json")


@pytest.mark.parametrize(
    "state",
    [
        *({"$": "tensor", "v": "z"}, {"$": "tensor", "v": 3}, {"$": "pickle", "v": ""}, {"$": []}),
        *({"$": "dict"}, {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[[1], 2]]}),
        *({"$": "int", "v": []}, {"$": "int", "v": "9" * 5000}, {"$": "bytes", "v": "!"}),
        *({"$": "complex", "v": []}, {"$": "dtype", "v": "nn"}, {"$": "device", "v": "x"}),
        *({"$": "set", "v": [[1]]}, {"$": "set", "v": [{"$": "tuple", "v": [{}]}]}),
        *({"$": "per_rank", "v": [{}]}, {"$": "tuple", "v": 3}),
    ],
)
def test_made_up_states_are_refused(tmp_path: Path, state: Any) -> None:
    body = saved(tmp_path / "a")
    checkpoint.save({"x": numbers(6, 4)}, tmp_path / "b")
    body["state"]["n"] = state
    (tmp_path / "a" / "index.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "a")
    if state != {"$": "tensor", "v": "z"}:  # whose names are none of theirs
        if state["$"] not in ("dtype", "device"):  # only torch knows the names
            with pytest.raises(CheckpointError):
                checkpoint.show(tmp_path / "a")
        with pytest.raises(CheckpointError):
            checkpoint.diff(tmp_path / "b", tmp_path / "a")
        assert checkpoint.verify(tmp_path / "a")


def test_names_do_not_command_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do they end a program that prints them."""
    state = {"a\x1b[2J": numbers(3), "b\ud800": "c\x07"}
    checkpoint.save(state, tmp_path)
    assert torch.equal(checkpoint.read(tmp_path)["a\x1b[2J"], numbers(3))
    checkpoint.show(tmp_path)
    out = capsys.readouterr().out
    assert all(name in out for name in ("a\\x1b[2J", "b\\ud800 = 'c\\x07'"))
    assert "\x1b[2J" not in out


def test_deep_nesting_and_keys_that_come_twice_are_refused(tmp_path: Path) -> None:
    body = saved(tmp_path)
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    body["meta"] = {"x": nested}
    (tmp_path / "index.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="nested more than 200 deep"):
        checkpoint.read(tmp_path)
    text = b'{"format": "x", "format": "y"'
    (tmp_path / "index.json").write_bytes(text + b',\n"crc32": %d\n}\n' % zlib.crc32(text))
    with pytest.raises(CheckpointError, match="a key is there twice"):
        checkpoint.read(tmp_path)
    (tmp_path / "index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match="not the index"):
        checkpoint.read(tmp_path)


def some_text() -> bytes:
    box = whole_box((2, 3))
    part = Part(box, "a.safetensors", 64, 24, (123,))
    tensor = SavedTensor("x", "F32", (2, 3), (part,), "in rows")
    files = {"a.safetensors": SavedFile(88, 7)}
    return index_text(Index({"x": tensor}, files, {"x": 1}, meta={"step": 3}))


TEXT = some_text()


@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255))
def test_any_damage_is_found(at: int, flipped: int) -> None:
    text = bytearray(TEXT)
    if flipped:
        text[at] ^= flipped
    else:
        del text[at:]
    with pytest.raises(CheckpointError, match="the file"):
        parse_index(bytes(text), "the file")


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    saved(tmp_path)
    text = (tmp_path / "index.json").read_bytes()
    assert index_text(parse_index(text, "index")) == text
