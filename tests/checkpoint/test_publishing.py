"""Models saved as published weights: sharded or not, read by transformers and by tilework."""

from __future__ import annotations

import json
import resource
import sys
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoint.faulty_calls import killed_at
from tests.checkpoint.test_published import IDS, MODELS, build, on_meta, transformers
from tilework import checkpoint
from tilework.checkpoint import PieceOf
from tilework.errors import CheckpointError
from tilework.mesh import init_device_mesh
from tilework.models import torch_state_dict
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_ranks_have_written_as_it_writes_it(
    name: str, tmp_path: Path
) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "expected")

    def program(rank: int) -> None:
        sharded = build(name)
        for layer in getattr(getattr(sharded, "model", None), "layers", ()):
            fully_shard(layer)
        fully_shard(sharded)
        checkpoint.save_pretrained(sharded, tmp_path / "saved")

    run_ranks(2, program)
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    _assert_same_files(tmp_path / "saved", tmp_path / "expected")
    own = on_meta(name)
    assert not checkpoint.load(tmp_path / "saved", into={"model": own}).unused
    torch.testing.assert_close(own(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["plan", "shards"])
def test_transformers_own_method_writes_the_files_of_a_single_process(
    kind: str, tmp_path: Path
) -> None:
    build("Llama").save_pretrained(tmp_path / "expected", max_shard_size="4KB")  # weights are tied

    def program(rank: int) -> None:
        model = build("Llama")
        if kind == "plan":
            parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
        else:
            fully_shard(model)
        model.save_pretrained(tmp_path / "saved", max_shard_size="4KB")
        with pytest.raises((OSError, RuntimeError), match="No such file"):  # on both ranks
            model.save_pretrained("/proc/none")

    run_ranks(2, program)
    expected = {each.name: each.read_bytes() for each in (tmp_path / "expected").iterdir()}
    assert expected == {each.name: each.read_bytes() for each in (tmp_path / "saved").iterdir()}


class _Peft(nn.Linear):
    """A module that saves as peft's do: the state dict is among other arguments by name."""

    def save_pretrained(self, path: Path, **kwargs: Any) -> None:
        torch.save(kwargs.get("state_dict") or self.state_dict(), path)


def test_a_method_that_takes_the_state_by_name_gets_whole_tensors(tmp_path: Path) -> None:
    torch_state_dict.gather_in_saving("_Peft", sys.modules[__name__])
    expected = _Peft(3, 4)

    def program(rank: int) -> None:
        model = deepcopy(expected)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ColwiseParallel())
        model.save_pretrained(tmp_path / "saved")

    run_ranks(2, program)
    torch.testing.assert_close(torch.load(tmp_path / "saved"), dict(expected.state_dict()))


def _assert_same_files(saved: Path, expected: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        if (expected / name).exists():
            written = json.loads((saved / name).read_text())
            assert written == json.loads((expected / name).read_text())
    ours, theirs = _read(saved), _read(expected)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def _read(folder: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return loaded


@pytest.mark.parametrize("kind", ["plan", "replicas", "plain"])
def test_any_layout_is_written_in_several_files_of_a_dtype(kind: str, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        model: nn.Module = build("Mistral")
        if kind == "plan":
            parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
        elif kind == "replicas":
            model = DistributedDataParallel(model)
        checkpoint.save_pretrained(model, tmp_path, dtype=torch.bfloat16, file_bytes=4096)

    run_ranks(2, program)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    again = transformers.MistralForCausalLM.from_pretrained(tmp_path)
    assert again.dtype is torch.bfloat16
    for mine, given in zip(again.parameters(), build("Mistral").parameters(), strict=True):
        assert mine.equal(given.bfloat16())


def test_names_are_mapped_back_by_the_table_that_loading_uses(tmp_path: Path) -> None:
    parts = {
        "qkv": nn.Linear(3, 12),
        "left": nn.Linear(2, 6, False),
        "right": nn.Linear(2, 6, False),
    }
    model = nn.Sequential(OrderedDict(parts))
    names: dict[str, Any] = {
        "qkv.weight": ["q.weight", "k.weight", "v.weight"],
        "qkv.bias": ["q.bias", "k.bias", "v.bias"],
        "left.weight": PieceOf("both.weight", 0, 2, dim=1),
        "right.weight": PieceOf("both.weight", 1, 2, dim=1),
    }

    def program(rank: int) -> None:
        checkpoint.save_pretrained(fully_shard(deepcopy(model)), tmp_path, map_names=names)

    run_ranks(3, program)
    saved = _read(tmp_path)
    assert torch.cat([saved[f"{n}.weight"] for n in "qkv"]).equal(parts["qkv"].weight)
    expected = torch.cat([parts["left"].weight, parts["right"].weight], 1)
    assert saved["both.weight"].equal(expected)
    with torch.no_grad():
        given = [each.clone() for each in model.parameters()]
        for each in model.parameters():
            each.zero_()
    checkpoint.load(tmp_path, into=model, map_names=names)
    assert all(a.equal(b) for a, b in zip(model.parameters(), given, strict=True))


@pytest.mark.parametrize(("former", "later"), [(100, 1 << 20), (1 << 20, 100), (100, 100)])
def test_a_save_that_is_killed_leaves_the_former_weights(
    former: int, later: int, tmp_path: Path
) -> None:
    def save(value: float, file_bytes: int) -> None:
        checkpoint.save_pretrained(_filled(value), tmp_path, file_bytes=file_bytes)

    (tmp_path / "tokenizer.json").write_text("{}")
    save(1.0, former)
    seen: set[float] = set()
    number = 0
    while killed_at(number, lambda: save(2.0, later)):
        model = _filled(0.0)
        checkpoint.load(tmp_path, into=model)
        values = {float(model.weight[0, 0]), float(model.bias[0])}
        assert values in ({1.0}, {2.0})
        seen |= values
        if values == {2.0}:
            save(1.0, former)
        number += 1
    save(2.0, later)
    assert seen == {1.0, 2.0}
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.glob("*.safetensors"))) == (2 if later == 100 else 1)
    assert (tmp_path / "tokenizer.json").exists()


def _filled(value: float) -> nn.Linear:
    model = nn.Linear(4, 8).requires_grad_(False)
    model.weight.fill_(value)
    model.bias.fill_(value)
    return model


def test_values_that_differ_between_ranks_are_refused_on_all_of_them(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        model = _filled(float(rank))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save_pretrained(model, tmp_path)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert "'weight' differs between ranks" in first
    assert not list(tmp_path.glob("model*"))


def test_a_checkpoint_is_not_replaced_by_published_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(model, tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of tilework:"):
        checkpoint.save_pretrained(model, tmp_path)


def test_memory_grows_by_pieces(tmp_path: Path) -> None:
    def program(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4096, 8192, bias=False, dtype=torch.float32)  # 128 MiB, by columns
        parallelize_module(model, mesh, RowwiseParallel())
        checkpoint.save_pretrained(nn.Linear(4, 4), tmp_path / "first")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint.save_pretrained(model, tmp_path / "all", dtype=torch.bfloat16)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert max(run_ranks(2, program, kind="processes")) < 32 << 10
