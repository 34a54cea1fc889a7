"""Other formats, there and back, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch import nn

from tests.checkpoint.faulty_calls import killed_at
from tests.checkpoint.states import dtensor, model, numbers, train
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, ConvertOptions, RandomState, SaveOptions
from tilework.dtensor import Replicate, Shard
from tilework.testing import run_ranks

dcp: Any = torch_dcp
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks."""
    folder = tmp_path_factory.mktemp("saved") / "one"

    def program(rank: int) -> None:
        state = {
            "model": {
                "a.weight": dtensor(numbers(64, 48), (2, 2), [Shard(0), Shard(1)]),
                "a.bias": dtensor(numbers(48, dtype=torch.bfloat16), (4,), [Replicate()]),
                "empty": torch.zeros(0, 3),
            },
            "step": 3,
            "rates": [0.1, float("inf")],
        }
        checkpoint.save(state, folder, SaveOptions(meta={"step": 3}))

    run_ranks(4, program)
    return folder


def same(a: Path, b: Path) -> bool:
    return not checkpoint.diff(a, b)


@pytest.mark.parametrize(("name", "to"), [("x.pt", None), ("folder", "dcp"), ("new", "tilework")])
def test_there_and_back(saved: Path, tmp_path: Path, name: str, to: str | None) -> None:
    checkpoint.convert(saved, tmp_path / name, to)
    checkpoint.convert(tmp_path / name, tmp_path / "back")
    assert same(saved, tmp_path / "back")
    assert not checkpoint.verify(tmp_path / "back")
    assert not [each for each in os.listdir(tmp_path) if each.startswith(".")]


def test_names_that_become_the_same_are_refused(tmp_path: Path) -> None:
    checkpoint.save({"model": {"a": torch.ones(2)}, "a": torch.zeros(2)}, tmp_path / "saved")
    target, options = tmp_path / "x.safetensors", ConvertOptions(strip="model.")
    with pytest.raises(CheckpointError, match=r"'model\.a' and 'a' would both be named 'a'"):
        checkpoint.convert(tmp_path / "saved", target, options=options)
    assert not target.exists()


def test_safetensors_there_and_back(saved: Path, tmp_path: Path) -> None:
    options = ConvertOptions(names=["model.*"], strip="model.", file_bytes=10_000)
    checkpoint.convert(saved, tmp_path / "hf", "safetensors", options)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a.weight", "a.bias", "empty"}
    loaded = {
        k: v
        for f in set(index["weight_map"].values())
        for k, v in load_file(tmp_path / "hf" / f).items()
    }
    assert loaded["a.weight"].equal(numbers(64, 48))
    checkpoint.convert(tmp_path / "hf", tmp_path / "back", options=ConvertOptions(prefix="model."))
    differences = {each.name for each in checkpoint.diff(saved, tmp_path / "back")}
    assert differences == {"step", "rates"}
    # Names lead to where they belong, whatever the nesting.
    into = {"model": {"a.weight": torch.zeros(64, 48)}}
    checkpoint.load(tmp_path / "back", into=into)
    assert into["model"]["a.weight"].equal(numbers(64, 48))


def test_one_file_of_safetensors(saved: Path, tmp_path: Path) -> None:
    checkpoint.convert(saved, tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")["model.a.bias"].equal(
        numbers(48, dtype=torch.bfloat16)
    )


def test_files_of_others_load_into_models(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    save_file(net.state_dict(), tmp_path / "x.safetensors")
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.convert(tmp_path / "x.pt", tmp_path / "a")
    checkpoint.convert(tmp_path / "x.safetensors", tmp_path / "b")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "c")
    other = model()
    rates = torch.optim.Adam(other.parameters())
    checkpoint.load(tmp_path / "a", into={"model": other, "optimizer": rates})
    for mine, theirs in zip(rates.state.values(), optimizer.state.values(), strict=True):
        assert mine["exp_avg"].equal(theirs["exp_avg"])
    for folder, into in (("b", model()), ("c", {"model": model()})):
        checkpoint.load(tmp_path / folder, into=into)
        found = into if isinstance(into, nn.Module) else into["model"]
        assert all(map(torch.equal, found.parameters(), net.parameters()))


def test_torchs_dcp_reads_what_is_converted(saved: Path, tmp_path: Path) -> None:
    checkpoint.convert(saved, tmp_path / "dcp", "dcp")
    state: Any = {"model": {"a.weight": torch.zeros(64, 48)}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["model"]["a.weight"].equal(numbers(64, 48))
    assert state["step"] == 3


class Payload:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Payload()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"with weights_only: .*posix\.mkdir") as caught:
        checkpoint.convert(tmp_path / "x.pt", tmp_path / "a")
    assert "False" not in str(caught.value)  # torch advises to run it
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"it has posix\.mkdir, which DCP does not put there"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "b")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "a").exists()


def test_what_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint.convert(saved, saved)
    with pytest.raises(CheckpointError, match="is in no known format"):
        checkpoint.convert(tmp_path / "nothing", tmp_path / "x")
    with pytest.raises(ValueError, match="the format must be one of tilework, safetensors"):
        checkpoint.convert(saved, tmp_path / "x", "onnx")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="its header is too long"):
        checkpoint.convert(tmp_path / "bad.safetensors", tmp_path / "x")
    (tmp_path / "short.safetensors").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not a safetensors file: it has 1 bytes"):
        checkpoint.convert(tmp_path / "short.safetensors", tmp_path / "x")
    for inside in (saved / "x", saved / "deep" / "x.safetensors"):
        with pytest.raises(CheckpointError, match=r"lies inside of .*, which is read"):
            checkpoint.convert(saved, inside)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../y"}}')
    with pytest.raises(CheckpointError, match=r"names the file '\.\./y'"):
        checkpoint.convert(tmp_path / "hf", tmp_path / "x")


def test_damaged_files_of_torch_are_named_without_advice_to_run_them(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1000)}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    dcp.save({"x": torch.ones(9), "n": (1, 2)}, checkpoint_id=tmp_path / "dcp")
    part = next((tmp_path / "dcp").glob("*.distcp"))
    for source, file in ((tmp_path / "x.pt", tmp_path / "x.pt"), (tmp_path / "dcp", part)):
        for damaged in (b"", b"\xff" * 8 + file.read_bytes()[8:], whole[:-500]):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as raised:
                checkpoint.convert(source, tmp_path / "target")
            assert file.name in str(raised.value)
            assert "set to" not in str(raised.value)
            assert "trust" not in str(raised.value)


#: Sets an attribute of DCP's class for the rest of the process, if it is let.
CHANGES_A_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVharm\nVdone\nstb."


def test_metadata_of_dcp_changes_no_class(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(CHANGES_A_CLASS)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "x")
    assert not hasattr(dcp.metadata.Metadata, "harm")


@pytest.mark.parametrize("elsewhere", ["../part", "/etc/hostname", "sub/part", ".."])
def test_files_of_dcp_lie_in_its_folder(tmp_path: Path, elsewhere: str) -> None:
    dcp.save({"x": torch.ones(9)}, checkpoint_id=tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = elsewhere
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="only files in its own folder are read"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "x")


def test_metadata_of_dcp_from_any_python(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle members of enums as calls of ``getattr``."""

    class OldPickler(pickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            return (
                (getattr, (type(given), given.name)) if isinstance(given, Enum) else NotImplemented
            )

    dcp.save({"x": torch.ones(9)}, checkpoint_id=tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    loaded = pickle.loads(metadata.read_bytes())
    with metadata.open("wb") as file:
        OldPickler(file).dump(loaded)
    checkpoint.convert(tmp_path / "dcp", tmp_path / "x")
    assert checkpoint.read(tmp_path / "x")["x"].tolist() == [1.0] * 9
    metadata.write_bytes(pickle.dumps(Reads()))
    with pytest.raises(CheckpointError, match="reads 'system' of an object"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "y")


class Reads:
    def __reduce__(self) -> Any:
        return getattr, ("a text", "system")


def test_metadata_of_dcp_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    for damaged in (b"", b"garbage", b"\x80\x05a", b"(lp0\ng5\n", b"\x80\x05N."):
        (tmp_path / "dcp" / ".metadata").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            checkpoint.convert(tmp_path / "dcp", tmp_path / "target")


def test_tensors_within_tuples_of_dcp(tmp_path: Path) -> None:
    dcp.save({"pair": (torch.ones(2), 3), "pair.0": torch.zeros(1)}, checkpoint_id=tmp_path / "dcp")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "x")
    found = checkpoint.read(tmp_path / "x")
    assert found["pair"][0].tolist() == [1, 1]
    assert found["pair"][1] == 3
    assert found["pair.0"].tolist() == [0]


@pytest.mark.parametrize("name", ["x.pt", "dcp"])
def test_arrays_are_tensors_where_weights_only_takes_no_others(tmp_path: Path, name: str) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(1)
    checkpoint.save({"random": RandomState(), "x": numpy.arange(3)}, tmp_path / "a")
    expected = numpy.random.rand()
    checkpoint.convert(tmp_path / "a", tmp_path / name, "dcp" if name == "dcp" else None)
    checkpoint.convert(tmp_path / name, tmp_path / "b")
    found = checkpoint.read(tmp_path / "b")
    assert found["x"].tolist() == [0, 1, 2]
    RandomState().load_state_dict(found["random"])
    assert numpy.random.rand() == expected


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files have room when written")
@pytest.mark.parametrize("name", ["x.pt", "dcp"])
def test_a_full_disk_is_told_before_a_map_is_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.convert(saved, tmp_path / name, "dcp" if name == "dcp" else None)
    assert set(os.listdir(tmp_path)) == before


def test_names_that_a_format_has_not(tmp_path: Path) -> None:
    checkpoint.save({"__metadata__": torch.ones(1), 1: torch.ones(1), "1": torch.ones(1)}, tmp_path)
    with pytest.raises(CheckpointError, match="cannot hold a tensor of the name '__meta"):
        checkpoint.convert(tmp_path, f"{tmp_path}.safetensors")
    with pytest.raises(CheckpointError, match="cannot be written by DCP: "):
        checkpoint.convert(tmp_path, f"{tmp_path}-dcp", "dcp")
    assert not Path(f"{tmp_path}.safetensors").exists()
    assert not Path(f"{tmp_path}-dcp").exists()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor of 256 MiB goes through 32 MiB of it at a time."""
    program = """
import resource, sys, torch
from tilework import checkpoint
source, target = sys.argv[1:]
checkpoint.convert(source, target + ".safetensors")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.convert(source, target)
checkpoint.convert(source, target + ".safetensors2", "safetensors")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    checkpoint.save({"x": torch.zeros(64 << 20)}, tmp_path / "large")
    paths = [str(tmp_path / name) for name in ("large", "new")]
    arguments = [sys.executable, "-c", program, *paths]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=180)
    assert int(done.stdout) < 64 << 10  # KiB


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills by signals")
@pytest.mark.parametrize("name", ["out", "out.safetensors", "several"])
def test_a_conversion_that_is_killed_can_be_made_again(
    saved: Path, tmp_path: Path, name: str
) -> None:
    to = "safetensors" if name == "several" else None
    options = ConvertOptions(file_bytes=4000)
    for number in range(1, 200, 5):
        target = tmp_path / str(number) / name

        def convert(target: Path = target) -> None:
            checkpoint.convert(saved, target, to, options)

        if not killed_at(number, convert):
            break
        ends = [target / "index.json", target / "model.safetensors.index.json"]
        if not target.is_file() and not any(end.exists() for end in ends):
            convert()
        checkpoint.convert(target, tmp_path / str(number) / "back")
        assert len(checkpoint.index_of(tmp_path / str(number) / "back").tensors) == 3
    assert number > 5


def test_what_was_not_written_to_the_end_is_refused(saved: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(saved, half)
    (half / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no index\.json: it was not written to the end"):
        checkpoint.convert(half, tmp_path / "x")
    several = tmp_path / "several"
    checkpoint.convert(saved, several, "safetensors", ConvertOptions(file_bytes=1000))
    (several / "model.safetensors.index.json").unlink()
    checkpoint.convert(several, tmp_path / "all")  # all of them are there
    min(several.iterdir()).unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        checkpoint.convert(several, tmp_path / "x")
    (tmp_path / "text").write_text("hi\n")
    with pytest.raises(CheckpointError, match="cannot be read with weights_only"):
        checkpoint.convert(tmp_path / "text", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_urls(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    there = f"memory://{tmp_path.name}"
    checkpoint.convert(saved, f"{there}/a")
    checkpoint.convert(f"{there}/a", f"{there}/b/x.safetensors")
    checkpoint.convert(f"{there}/a", f"{there}/c", "safetensors", ConvertOptions(file_bytes=1000))
    checkpoint.convert(f"{there}/c", f"{there}/d")
    checkpoint.convert(f"{there}/b/x.safetensors", tmp_path / "e")
    assert not checkpoint.diff(f"{there}/d", tmp_path / "e")
    for taken in (f"{there}/a", f"{there}/b/x.safetensors", f"{there}/c"):
        with pytest.raises(CheckpointError, match="is there already"):
            checkpoint.convert(saved, taken, "safetensors" if taken.endswith("c") else None)
    with pytest.raises(ValueError, match="is written to files of this machine"):
        checkpoint.convert(saved, f"{there}/x", "dcp")
    checkpoint.convert(saved, f"file://{tmp_path}/f.pt")
    checkpoint.convert(f"file://{tmp_path}/f.pt", f"file://{tmp_path}/g")
    assert not checkpoint.diff(saved, tmp_path / "g")
