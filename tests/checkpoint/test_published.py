"""Published weights: folders that transformers writes, sharded while they are read."""

from __future__ import annotations

import os
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import pytest
import torch
from torch import Tensor, nn

from tilework import checkpoint
from tilework.checkpoint import PieceOf
from tilework.checkpoint.safetensors_index import published_index
from tilework.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tilework.checkpoint.storage import LocalStorage
from tilework.errors import CheckpointError
from tilework.mesh import init_device_mesh
from tilework.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from tilework.testing import run_ranks

transformers: Any = pytest.importorskip("transformers", reason="it is in the extra dev")

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER = {**_SIZES, **_SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 32}
#: By architecture the rest of its classes' names, and a configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "Qwen3": ("ForCausalLM", {**_DECODER, "head_dim": 8}),
    "Mistral": ("ForCausalLM", _DECODER),
    "Mixtral": ("ForCausalLM", {**_DECODER, "num_local_experts": 11}),
    "GPT2": (
        "LMHeadModel",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, **_SPECIAL},
    ),
    "Bert": ("ForMaskedLM", _SIZES),
}
IDS = torch.arange(12).view(2, 6)


def build(name: str) -> Any:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}{kind}")(config).eval()


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return build(name)


def _written(name: str, folder: Path, **settings: Any) -> Tensor:
    model = build(name)
    model.save_pretrained(folder, **settings)
    logits: Tensor = model(IDS).logits
    return logits.detach()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_on_meta_is_filled_and_computes_as_the_published_one(
    name: str, tmp_path: Path
) -> None:
    expected = _written(name, tmp_path, max_shard_size="8KB")

    def program(rank: int) -> Any:
        model = on_meta(name)
        fully_shard(model)
        report = checkpoint.load(tmp_path, into=model)
        assert not report.unused
        assert set(report.loaded) == set(model.state_dict())
        return model(IDS).logits.detach()

    for logits in run_ranks(2, program):
        torch.testing.assert_close(logits, expected)


def test_a_plan_shards_while_weights_are_read(tmp_path: Path) -> None:
    expected = _written("Llama", tmp_path)
    plan = {
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }

    def program(rank: int) -> Tensor:
        model = on_meta("Llama")
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        checkpoint.load(tmp_path, into=model)
        logits: Tensor = model(IDS).logits
        return logits.detach()

    for logits in run_ranks(2, program):
        torch.testing.assert_close(logits, expected)


def test_a_model_of_the_base_class_takes_the_weights_of_one_with_a_head(tmp_path: Path) -> None:
    _written("Bert", tmp_path)
    base = transformers.BertModel(transformers.BertConfig(**_SIZES), add_pooling_layer=False)
    report = checkpoint.load(tmp_path, into=base)
    assert base.embeddings.word_embeddings.weight.equal(
        build("Bert").bert.embeddings.word_embeddings.weight
    )
    assert all(name.startswith("cls.") for name in report.unused)


def test_tied_weights_stay_tied_and_dtypes_are_the_models(tmp_path: Path) -> None:
    model = build("Llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    other = on_meta("Llama").float()
    report = checkpoint.load(tmp_path, into=other)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.lm_head.weight.dtype is torch.float32
    assert other.lm_head.weight.equal(model.lm_head.weight.float())
    assert "lm_head.weight" in report.loaded


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    saved = nn.Linear(512, 1024)
    _save_plain(saved, tmp_path)

    def program(rank: int) -> int:
        with torch.device("meta"):
            model = fully_shard(nn.Linear(512, 1024))
        return checkpoint.load(tmp_path, into=model).bytes_read

    nbytes = sum(t.nbytes for t in published_index(LocalStorage(tmp_path)).tensors.values())
    assert sum(run_ranks(2, program)) <= nbytes + 4096  # the bias is in one piece


def test_what_a_model_has_joined_or_in_pieces_is_said_by_names(tmp_path: Path) -> None:
    apart = nn.ModuleDict({name: nn.Linear(3, 4) for name in "qkv"})
    apart["both"] = nn.Linear(4, 6, bias=False)
    _save_plain(apart, tmp_path)
    half = nn.Linear(2, 6, bias=False)
    parts = {"qkv": nn.Linear(3, 12), "left": half, "right": deepcopy(half)}
    joined = nn.Sequential(OrderedDict(parts))
    names: dict[str, Any] = {
        "qkv.weight": ["q.weight", "k.weight", "v.weight"],
        "qkv.bias": ["q.bias", "k.bias", "v.bias"],
        "left.weight": PieceOf("both.weight", 0, 2, dim=1),
        "right.weight": PieceOf("both.weight", 1, 2, dim=1),
    }

    def program(rank: int) -> dict[str, Tensor]:
        model = fully_shard(deepcopy(joined))
        checkpoint.load(tmp_path, into=model, map_names=names)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    state = run_ranks(2, program)[0]
    given = apart.state_dict()
    for kind in ("weight", "bias"):
        assert state[f"qkv.{kind}"].equal(torch.cat([given[f"{name}.{kind}"] for name in "qkv"]))
    both = given["both.weight"]
    assert torch.cat([state["left.weight"], state["right.weight"]], 1).equal(both)


@pytest.mark.parametrize(("number", "count"), [(3, 3), (-1, 3), (0, 0), (0, -1)])
def test_a_piece_that_does_not_exist_is_refused(tmp_path: Path, number: int, count: int) -> None:
    _save_plain(nn.Linear(2, 6, bias=False), tmp_path)
    names = {"weight": PieceOf("weight", number, count)}
    with pytest.raises(CheckpointError, match=f"'weight' has no piece {number} of {count}: "):
        checkpoint.load(tmp_path, into=nn.Linear(2, 2, bias=False), map_names=names)


def test_missing_weights_are_named_and_the_model_stayson_meta(tmp_path: Path) -> None:
    _save_plain(nn.Linear(2, 2, bias=False), tmp_path)
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match="lacks bias"):
        checkpoint.load(tmp_path, into=model)
    assert model.bias.is_meta


def test_missing_weights_are_told_by_the_names_that_were_looked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    _save_plain(nn.Sequential(OrderedDict(up=model)), tmp_path)
    looked_for = r"lacks up\.weight \(for net\.weight\): .* It has net\.up\.weight, unused"
    with pytest.raises(CheckpointError, match=looked_for):
        checkpoint.load(tmp_path, into={"net": model}, map_names={"net.weight": "up.weight"})
    checkpoint.load(tmp_path, into={"net": model}, map_names={"net.weight": "net.up.weight"})


def test_a_buffer_on_meta_that_no_file_has_is_refused(tmp_path: Path) -> None:
    _save_plain(nn.Linear(2, 2), tmp_path)
    model = nn.Linear(2, 2, device="meta")
    model.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="the buffer scale is on 'meta'"):
        checkpoint.load(tmp_path, into=model)
    assert model.weight.is_meta


def test_files_may_be_links_as_in_the_cache_of_downloads(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    expected = _written("Mistral", blobs, max_shard_size="8KB")
    snapshot.mkdir()
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(f"../blobs/{number}")
        file.rename(blobs / str(number))
    model = on_meta("Mistral")
    checkpoint.load(snapshot, into=model)
    torch.testing.assert_close(model(IDS).logits, expected)
    checkpoint.convert(snapshot, tmp_path / "converted")


def test_a_folder_that_lacks_files_is_refused(tmp_path: Path) -> None:
    _written("Mistral", tmp_path, max_shard_size="8KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        checkpoint.load(tmp_path, into=on_meta("Mistral"))


def test_a_conversion_that_moves_elements_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    _written("Mistral", tmp_path)
    turned = WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [turned])
    with pytest.raises(CheckpointError, match="converted by Transpose"):
        checkpoint.load(tmp_path, into=on_meta("Mistral"))


def _save_plain(module: nn.Module, folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_()
    checkpoint.save(dict(module.state_dict()), folder / "saved")
    checkpoint.convert(folder / "saved", folder / "model.safetensors")
