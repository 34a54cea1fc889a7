"""Saving and loading as programs do: any state, any layout to any other, all of it or some."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.states import dtensor, full, in_rows, model, numbers, train, zeros_like
from tilework import checkpoint
from tilework.checkpoint import CheckpointError, RandomState, SaveOptions
from tilework.checkpoint.tensor_bytes import DTYPES
from tilework.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.layout import Placement
from tilework.testing import run_ranks


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# -- what a state may have --------------------------------------------------------------------


def test_any_nesting_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "numbers": [1, 2.5, float("inf"), -(2**70), True, None],
        "tuple": (1, "a", [b"bytes", (2,)]),
        "keys": {1: "one", 2.5: "two and a half", None: 0, "$": 1, "a.b": {"c": 3}},
        "empty": {"dict": {}, "list": [], "tuple": (), "tensor": torch.zeros(0, 3)},
        "scalar": torch.tensor(3),
        "dtype": torch.bfloat16,
        "complex": 1 + 2j,
        "set": {3, 1, 2},
    }
    checkpoint.save(state, tmp_path / "x")
    found = checkpoint.read(tmp_path / "x")
    assert torch.equal(found["empty"].pop("tensor"), state["empty"].pop("tensor"))
    assert torch.equal(found.pop("scalar"), state.pop("scalar"))
    assert found == state
    assert [type(n) for n in found["numbers"]] == [int, float, float, int, bool, type(None)]


@pytest.mark.parametrize("root", [3, "text", [1, [2]], numbers(3), ()])
def test_a_state_may_be_anything(tmp_path: Path, root: Any) -> None:
    checkpoint.save(root, tmp_path)
    found = checkpoint.read(tmp_path)
    assert torch.equal(found, root) if isinstance(root, torch.Tensor) else found == root


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int16, torch.uint32, torch.float16, torch.bfloat16),
        *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint64),
    ],
)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (5, 3)).to(dtype)
    checkpoint.save({"x": x}, tmp_path)
    into = {"x": torch.zeros(5, 3).to(dtype)}
    checkpoint.load(tmp_path, into=into)
    assert into["x"].view(torch.uint8).equal(x.view(torch.uint8))


def test_what_is_not_contiguous_is_saved_as_it_looks(tmp_path: Path) -> None:
    x = numbers(6, 8)
    checkpoint.save({"t": x.t(), "step": x[::2, 1::3], "wide": x[0].expand(4, 8)}, tmp_path)
    found = checkpoint.read(tmp_path)
    assert found["t"].equal(x.t())
    assert found["step"].equal(x[::2, 1::3])
    assert found["wide"].equal(x[0].expand(4, 8))
    into = {"t": torch.zeros(6, 8).t(), "step": torch.zeros(6, 8)[::2, 1::3]}
    checkpoint.load(tmp_path, into=into)
    assert into["t"].equal(x.t())
    assert into["step"].equal(x[::2, 1::3])


def test_what_a_checkpoint_does_not_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model\.hook is of type function"):
        checkpoint.save({"model": {"hook": lambda: 0}}, tmp_path)
    with pytest.raises(TypeError, match=r"'model\.table' is sparse"):
        checkpoint.save({"model": {"table": torch.eye(2).to_sparse()}}, tmp_path)
    assert not os.listdir(tmp_path)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    x = numbers(100)
    checkpoint.save({"a": x, "b": x, "c": x[:50]}, tmp_path)
    found = checkpoint.read(tmp_path)
    assert found["a"] is found["b"]
    assert found["c"].equal(x[:50])
    assert sum(map(os.path.getsize, data_files(tmp_path))) < 1000


def test_numpy_arrays_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    checkpoint.save({"x": numpy.arange(4), "y": numpy.float32(2)}, tmp_path)
    found = checkpoint.read(tmp_path)
    assert isinstance(found["x"], numpy.ndarray)
    assert found["x"].tolist() == [0, 1, 2, 3]
    into = {"x": numpy.zeros(4, dtype=int), "y": 0.0}
    array = into["x"]
    checkpoint.load(tmp_path, into=into)
    assert array.tolist() == [0, 1, 2, 3]
    assert into["y"] == 2


# -- the files --------------------------------------------------------------------------------


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        state = {"w": dtensor(numbers(10, 4), (2,), [Shard(0)]), "b": numbers(3)}
        checkpoint.save(state, tmp_path)

    run_ranks(2, program)
    found = {name: x for path in data_files(tmp_path) for name, x in load_file(path).items()}
    assert found["b"].equal(numbers(3))
    assert found["w[0:5, 0:4]"].equal(numbers(10, 4)[:5])
    assert found["w[5:10, 0:4]"].equal(numbers(10, 4)[5:])


def test_the_index_is_json(tmp_path: Path) -> None:
    checkpoint.save({"x": numbers(4), "n": 1}, tmp_path, SaveOptions(meta={"step": 7}))
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["format"], index["version"]) == ("tilework.checkpoint", 1)
    assert index["tensors"]["x"]["shape"] == [4]
    assert index["state"] == {"x": {"$": "tensor", "v": "x"}, "n": 1}
    assert index["meta"] == {"step": 7}
    assert checkpoint.index_of(tmp_path).meta == {"step": 7}
    part = index["tensors"]["x"]["parts"][0]
    with safe_open(tmp_path / part["file"], "pt") as file:
        assert file.get_tensor("x").equal(numbers(4))
    data = (tmp_path / part["file"]).read_bytes()
    assert data[part["begin"] :][: part["bytes"]] == numbers(4).numpy().tobytes()


def test_large_tensors_lie_in_several_files(tmp_path: Path) -> None:
    checkpoint.save({"x": numbers(1000, 10)}, tmp_path, SaveOptions(file_bytes=10_000))
    assert len(data_files(tmp_path)) == 4
    assert checkpoint.read(tmp_path)["x"].equal(numbers(1000, 10))


def test_replicated_tensors_are_written_by_ranks_in_turn(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        checkpoint.save({"x": numbers(1024, 1024), "y": [numbers(9)] * 2}, tmp_path)

    run_ranks(4, program)
    sizes = [path.stat().st_size for path in data_files(tmp_path)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 1000


# -- layouts ----------------------------------------------------------------------------------


NAMES = ["rows", "columns", "both", "strided", "replicated", "uneven", "plain"]


def layouts(x: torch.Tensor, ranks: int) -> dict[str, Any]:
    """The tensor in several layouts, on so many ranks."""
    half = 2 if ranks % 2 == 0 else 1
    mesh = (ranks // half, half)
    return {
        "rows": dtensor(x, (ranks,), [Shard(0)]),
        "columns": dtensor(x, (ranks,), [Shard(1)]),
        "both": dtensor(x, mesh, [Shard(0), Shard(1)]),
        "strided": dtensor(x, mesh, [Shard(0), Shard(0)]),
        "replicated": dtensor(x, mesh, [Replicate(), Shard(1)]),
        "uneven": in_rows(x, [1, x.shape[0] - 4, 0, 3]),
        "plain": x.clone(),
    }


@pytest.mark.parametrize("before", [1, 2, 4])
def test_any_layout_loads_into_any_other(tmp_path: Path, before: int) -> None:
    x = numbers(13, 10)
    run_ranks(before, lambda rank: checkpoint.save(layouts(x, before), tmp_path))
    for after in (1, 2, 3, 4, 8):

        def program(rank: int, after: int = after) -> None:
            for shift in (0, 1, 3):
                targets = {name: zeros_like(v) for name, v in layouts(x, after).items()}
                other = {n: NAMES[(i + shift) % len(NAMES)] for i, n in enumerate(NAMES)}
                checkpoint.load(tmp_path, into=targets, map_names=other)
                for name, value in targets.items():
                    assert full(value).equal(x), (name, other[name])

        run_ranks(after, program)


def sizes_of(total: int, cuts: list[int]) -> list[int]:
    edges = sorted({0, total, *(min(cut, total) for cut in cuts)})
    return [b - a for a, b in pairwise(edges)]


#: Meshes with a placement for each axis (a dim, or None: replicated), rows dealt to ranks in turn,
#: or plain tensors; and the number of ranks.
any_layout = st.one_of(
    st.tuples(
        st.sampled_from([(1,), (3,), (4,), (2, 2), (1, 3)]),
        st.lists(st.sampled_from([None, 0, 1]), min_size=2, max_size=2),
    ),
    st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.integers(1, 4), st.none()),
)


def in_layout(x: torch.Tensor, layout: Any) -> Any:
    ranks, how = layout
    if how is None:
        return x.clone()
    if isinstance(ranks, tuple):
        dims = how[: len(ranks)]
        return dtensor(x, ranks, [Replicate() if dim is None else Shard(dim) for dim in dims])
    return in_rows(x, sizes_of(x.shape[0], how))


@settings(max_examples=15)
@given(
    any_layout,
    any_layout,
    st.integers(1, 9),
    st.integers(1, 7),
    st.sampled_from(list(DTYPES.values())),
)
def test_layouts_shapes_and_dtypes_at_random(
    tmp_path_factory: pytest.TempPathFactory,
    before: Any,
    after: Any,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    x = (numbers(rows, columns) % 2).to(dtype)
    many, few = (
        layout[0] if isinstance(layout[0], int) else torch.Size(layout[0]).numel()
        for layout in (before, after)
    )

    def load(rank: int) -> bool:
        state = {"x": in_layout(torch.zeros_like(x), after)}
        checkpoint.load(folder, into=state)
        found = full(state["x"])
        return found.contiguous().view(torch.uint8).equal(x.view(torch.uint8))

    run_ranks(many, lambda rank: checkpoint.save({"x": in_layout(x, before)}, folder))
    assert all(run_ranks(few, load))


cuts = st.lists(st.integers(0, 3000), max_size=5)


@settings(max_examples=12)
@given(st.integers(1, 3000), st.integers(1, 40), cuts, cuts, st.integers(1, 4), st.integers(1, 4))
def test_uneven_rows_load_into_uneven_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    saved_cuts: list[int],
    loaded_cuts: list[int],
    before: int,
    after: int,
) -> None:
    folder = tmp_path_factory.mktemp("uneven")
    x = numbers(rows, columns)

    def save(rank: int) -> None:
        checkpoint.save({"x": in_rows(x, sizes_of(rows, saved_cuts))}, folder)

    def load(rank: int) -> bool:
        state = {"x": zeros_like(in_rows(x, sizes_of(rows, loaded_cuts)))}
        checkpoint.load(folder, into=state)
        return full(state["x"]).equal(x)

    run_ranks(before, save)
    assert all(run_ranks(after, load))


def test_partial_values_are_reduced_before_and_partial_again_after(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        x = DTensor.from_local(numbers(4), init_device_mesh("cpu", (2,)), [Partial()])
        checkpoint.save({"x": x}, tmp_path)
        into: Any = {"x": x * 0}
        checkpoint.load(tmp_path, into=into)
        return checkpoint.read(tmp_path)["x"].tolist(), into["x"].full_tensor().tolist()

    assert run_ranks(2, program)[1] == ([0, 2, 4, 6], [0, 2, 4, 6])


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    x = numbers(4096, 256)  # 4 MiB

    def program(rank: int) -> list[int]:
        rows = dtensor(x, (4,), [Shard(0)])
        checkpoint.save({"x": rows}, tmp_path)
        read = []
        for placement in (Shard(0), Shard(1), Replicate()):
            state = {"x": zeros_like(dtensor(x, (4,), [placement]))}
            read.append(checkpoint.load(tmp_path, into=state).bytes_read)
        return read

    # Columns and replicated values, too, are read once by all together.
    assert run_ranks(4, program) == [[1 << 20] * 3] * 4


def test_an_object_that_refuses_its_state_is_told_on_all_ranks(tmp_path: Path) -> None:
    class Choosy:
        def __init__(self, refuses: bool) -> None:
            self.refuses = refuses

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None:
            if self.refuses:
                raise RuntimeError("not mine")

    def program(rank: int) -> str:
        checkpoint.save({"x": numbers(3), "o": Choosy(False)}, tmp_path)
        state: dict[str, Any] = {"x": torch.zeros(3), "o": Choosy(rank == 1)}
        with pytest.raises(CheckpointError, match="All tensors are filled") as info:
            checkpoint.load(tmp_path, into=state)
        assert state["x"].equal(numbers(3))
        return str(info.value)

    messages = run_ranks(3, program)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1: ")
    assert "RuntimeError: not mine" in messages[0]


# -- ranks that differ ------------------------------------------------------------------------


def test_what_differs_between_ranks_is_saved_for_each(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        checkpoint.save({"x": numbers(2) + rank // 2, "seed": rank, "same": 5}, tmp_path)

    def load(rank: int) -> Any:
        state: Any = {"x": torch.zeros(2), "seed": -1, "same": 0}
        report = checkpoint.load(tmp_path, into=state)
        return state["x"].tolist(), state["seed"], state["same"], report.other_ranks

    run_ranks(3, save)
    assert run_ranks(4, load) == [
        ([0, 1], 0, 5, []),
        ([0, 1], 1, 5, []),
        ([1, 2], 2, 5, []),
        ([0, 0], -1, 5, ["x", "seed"]),
    ]
    assert checkpoint.read(tmp_path)["seed"] == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("name", ["copies", "plain"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_one_tensor_is_not_filled_from_copies_that_differ(
    name: str, placement: Placement, tmp_path: Path
) -> None:
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        copies = distribute_tensor(numbers(4) + rank // 2, mesh["tp"], [Shard(0)])
        checkpoint.save({"copies": copies, "plain": numbers(4) + rank}, tmp_path)

    def load(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        own = {"copies": distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)])}
        checkpoint.load(tmp_path, into=own)
        assert own["copies"].full_tensor().equal(numbers(4) + rank // 2)
        over_all = distribute_tensor(torch.zeros(4), mesh, [placement, Replicate()])
        with pytest.raises(CheckpointError, match=f"{name} lies on ranks .* different tensors"):
            checkpoint.load(tmp_path, into={name: over_all})
        return over_all.full_tensor().tolist()

    run_ranks(4, save)
    assert run_ranks(4, load) == [[0.0] * 4] * 4


def test_what_only_some_ranks_have_is_saved(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        checkpoint.save({f"stage{rank}": {"w": numbers(3) * rank}}, tmp_path)

    def load(rank: int) -> Any:
        state = {f"stage{1 - rank}": {"w": torch.zeros(3)}}
        checkpoint.load(tmp_path, into=state)
        return state[f"stage{1 - rank}"]["w"].tolist()

    run_ranks(2, save)
    assert run_ranks(2, load) == [[0, 1, 2], [0, 0, 0]]


# -- parts and other names ----------------------------------------------------------------------


def test_parts_by_names(tmp_path: Path) -> None:
    checkpoint.save({"a": {"x": numbers(2), "y": numbers(3)}, "b": numbers(4), "n": 1}, tmp_path)
    assert list(checkpoint.read(tmp_path, "a.*")) == ["a"]
    assert list(checkpoint.read(tmp_path, ["*.y", "n"])["a"]) == ["y"]
    state: Any = {"a": {"x": torch.zeros(2), "y": torch.zeros(3)}, "b": torch.zeros(4)}
    report = checkpoint.load(tmp_path, into=state, names=["a.x", "b"])
    assert state["a"]["y"].tolist() == [0, 0, 0]
    assert report.loaded == ["a.x", "b"]
    assert report.unused == ["a.y", "n"]


def test_missing_names_are_told(tmp_path: Path) -> None:
    checkpoint.save({"x": numbers(2)}, tmp_path)
    state: Any = {"x": torch.zeros(2), "y": torch.ones(2), "n": 3}
    with pytest.raises(CheckpointError, match=r"lacks y, n: rename them with map_names"):
        checkpoint.load(tmp_path, into=state)
    assert state["x"].tolist() == [0, 0]
    report = checkpoint.load(tmp_path, into=state, strict=False)
    assert report.missing == ["y", "n"]
    assert state["x"].tolist() == [0, 1]
    assert "missing: y, n" in str(report)


def test_what_other_ranks_compose_is_unused_here(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "b": torch.zeros(2), "c": torch.ones(1)}, tmp_path)

    def program(rank: int) -> list[str]:
        state = {"both": torch.empty(4)} if rank == 0 else {"c": torch.empty(1)}
        names = lambda name: ["a", "b"] if name == "both" else name  # noqa: E731
        return checkpoint.load(tmp_path, into=state, map_names=names, strict=False).unused

    assert run_ranks(2, program) == [["c"], ["a", "b"]]


def test_a_view_that_had_to_move_is_saved_and_refuses_to_be_loaded_into(tmp_path: Path) -> None:
    def program(rank: int) -> float:
        x = dtensor(numbers(4), (2,), [Shard(0)])
        x.fill_(5)
        view = x[3]
        checkpoint.save({"v": view}, tmp_path / "a")
        saved = {"v": torch.zeros(())}
        checkpoint.load(tmp_path / "a", into=saved)
        with pytest.raises(checkpoint.CheckpointError, match="load into the base"):
            checkpoint.load(tmp_path / "a", into={"v": view})
        return saved["v"].item()

    assert run_ranks(2, program) == [5.0, 5.0]


class Best(NamedTuple):
    epoch: int
    loss: float


def test_names_are_mapped(tmp_path: Path) -> None:
    checkpoint.save({"net": {"w": numbers(2)}}, tmp_path)
    state = {"model": {"w": torch.zeros(2)}}
    checkpoint.load(tmp_path, into=state, map_names=lambda name: name.replace("model", "net"))
    assert state["model"]["w"].tolist() == [0, 1]


@pytest.mark.parametrize("mapped", [[], None, ["x", 3]])
def test_map_names_must_give_names(tmp_path: Path, mapped: Any) -> None:
    checkpoint.save({"x": numbers(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"map_names gives .* for 'y': it must give a name"):
        checkpoint.load(tmp_path, into={"y": numbers(2)}, map_names={"y": mapped})


def test_lists_and_named_tuples_of_numbers_stay_what_they_are(tmp_path: Path) -> None:
    losses = [0.0]
    checkpoint.save({"best": Best(3, 0.5), "losses": [0.5, 0.25]}, tmp_path)
    state = {"best": Best(0, 1.0), "losses": losses}
    checkpoint.load(tmp_path, into=state)
    assert (type(state["best"]), state["best"]) == (Best, (3, 0.5))
    assert losses == [0.5, 0.25]


def test_other_shapes_are_refused_and_other_dtypes_told(tmp_path: Path) -> None:
    checkpoint.save({"x": numbers(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"x has shape \[3\], and 'x' in the checkpoint has"):
        checkpoint.load(tmp_path, into={"x": torch.zeros(3)})
    state = {"x": torch.zeros(2, dtype=torch.float16)}
    assert checkpoint.load(tmp_path, into=state).converted == ["x"]
    assert state["x"].tolist() == [0, 1]


# -- training -----------------------------------------------------------------------------------


def test_the_next_step_has_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    train(net, optimizer, scheduler, steps=2)
    state = {"model": net, "optimizer": optimizer, "lr": scheduler, "random": RandomState()}
    checkpoint.save(state, tmp_path)
    train(net, optimizer, scheduler, steps=2)

    torch.manual_seed(5)
    again = model()
    other = torch.optim.AdamW(again.parameters(), lr=0.7)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(other, 4)
    checkpoint.load(
        tmp_path,
        into={"model": again, "optimizer": other, "lr": rates, "random": RandomState()},
    )
    train(again, other, rates, steps=2)
    assert scheduler.state_dict() == rates.state_dict()
    for name, value in net.state_dict().items():
        assert again.state_dict()[name].equal(value), name


def test_optimizer_state_follows_its_parameters(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    train(net, optimizer)
    checkpoint.save({"model": net, "optimizer": optimizer}, tmp_path)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()
            self.head = nn.Linear(2, 2)

    other = Other()
    groups: Any = [
        {"params": list(other.head.parameters()), "lr": 0.5},
        {"params": list(other.layers.parameters())[::-1]},
    ]
    into: Any = {"model": other, "optimizer": torch.optim.Adam(groups, lr=0.9)}
    report = checkpoint.load(
        tmp_path,
        into=into,
        strict=False,
        map_names=lambda name: name.replace("layers.", ""),
    )
    assert report.missing == [
        "model.head.weight",
        "model.head.bias",
        "optimizer.state.head.weight",
        "optimizer.state.head.bias",
    ]
    found = into["optimizer"].state
    for mine, theirs in zip(other.layers.parameters(), net.parameters(), strict=True):
        assert found[mine]["exp_avg"].equal(optimizer.state[theirs]["exp_avg"])
        assert mine.equal(theirs)
    assert [group["lr"] for group in into["optimizer"].param_groups] == [0.5, 0.1]
    assert not found[other.head.weight]


def test_an_optimizer_without_its_module_goes_by_position(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer)
    checkpoint.save({"model": net, "optimizer": optimizer}, tmp_path)
    other = torch.optim.SGD(model().parameters(), lr=0.7, momentum=0.1)
    checkpoint.load(tmp_path, into={"optimizer": other})
    assert other.param_groups[0]["momentum"] == 0.9
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert mine["momentum_buffer"].equal(theirs["momentum_buffer"])


def test_lbfgs_and_grad_scaler(tmp_path: Path) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), history_size=3, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (net(torch.ones(2, 3)) - 1).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpoint.save({"m": net, "o": optimizer, "s": scaler}, tmp_path)
    again = nn.Linear(3, 1)
    other = torch.optim.LBFGS(again.parameters(), history_size=3, max_iter=3)
    scale = torch.amp.GradScaler("cpu")
    checkpoint.load(tmp_path, into={"m": again, "o": other, "s": scale})
    assert scale.get_scale() == 8
    mine, theirs = (next(iter(o.state.values())) for o in (other, optimizer))
    assert mine.keys() == theirs.keys()
    assert [x.tolist() for x in mine["old_dirs"]] == [x.tolist() for x in theirs["old_dirs"]]


def test_extra_state_and_wrapped_modules(tmp_path: Path) -> None:
    class Counter(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    counter = Counter(2, 2)
    counter.count = 4
    checkpoint.save({"m": nn.DataParallel(counter)}, tmp_path)
    again = Counter(2, 2)
    checkpoint.load(tmp_path, into={"m": again})
    assert again.count == 4
    assert again.weight.equal(counter.weight)


def test_gradients_do_not_see_a_load(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    checkpoint.save({"m": net}, tmp_path)
    x = net.weight * net.weight
    checkpoint.load(tmp_path, into={"m": net})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()  # type: ignore[no-untyped-call]


# -- damage -------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_told_on_all_ranks(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        checkpoint.save({"w": dtensor(numbers(8, 8), (2,), [Shard(0)])}, tmp_path)

    def load(rank: int) -> str:
        with pytest.raises(CheckpointError, match="The file is damaged") as info:
            checkpoint.load(tmp_path, into={"w": dtensor(torch.zeros(8, 8), (2,), [Shard(0)])})
        assert info.value.ranks == (1,)
        assert info.value.tensor == "w"
        assert info.value.file.endswith("rank00001-00000.safetensors")
        return str(info.value)

    run_ranks(2, save)
    flip(data_files(tmp_path)[1], -5)
    messages = run_ranks(2, load)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: ")
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        checkpoint.read(tmp_path)
    checkpoint.read(tmp_path, verify=False)


def test_short_missing_and_linked_files_are_told(tmp_path: Path) -> None:
    checkpoint.save({name: numbers(10) for name in "uvwxy"}, tmp_path)
    (path,) = data_files(tmp_path)

    def is_told(what: str) -> None:
        with pytest.raises(CheckpointError, match=what) as raised:
            checkpoint.read(tmp_path)
        assert "it has parts of the tensors 'u', 'v', 'w' and 2 more" in str(raised.value)
        assert (raised.value.file, raised.value.tensor) == (str(path), "u")

    os.truncate(path, 100)
    is_told(r"has 100 bytes, the index says .* truncated")
    path.rename(tmp_path / "elsewhere")
    is_told("No such file")
    path.symlink_to(tmp_path / "elsewhere")
    is_told("is a symlink")


def test_files_are_looked_at_before_memory_is_taken(tmp_path: Path) -> None:
    checkpoint.save(
        {"a": {"x": numbers(10)}, "b": numbers(10)}, tmp_path, SaveOptions(file_bytes=40)
    )
    first, second = data_files(tmp_path)
    state = {"a": None, "b": torch.zeros(10)}
    second.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.load(tmp_path, into=state)
    assert state["a"] is None
    assert state["b"].tolist() == [0] * 10  # type: ignore[union-attr]
    assert first.exists()


@pytest.mark.parametrize("at", [10, 200, -4])
def test_a_damaged_index_is_told(tmp_path: Path, at: int) -> None:
    checkpoint.save({"w": numbers(10), "n": 3}, tmp_path)
    flip(tmp_path / "index.json", at)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        checkpoint.read(tmp_path)


def test_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no index"):
        checkpoint.load(tmp_path, into={})


def test_a_checkpoint_takes_the_place_of_another(tmp_path: Path) -> None:
    for number in range(3):
        checkpoint.save({"x": numbers(3) + number}, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert checkpoint.read(tmp_path)["x"].tolist() == [2, 3, 4]
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        checkpoint.save({"x": 1}, tmp_path, SaveOptions(overwrite=False))


@pytest.mark.parametrize("url", ["memory://ckpt/one", "file://{tmp}/two"])
def test_urls(tmp_path: Path, url: str) -> None:
    pytest.importorskip("fsspec")
    url = url.format(tmp=tmp_path)

    def program(rank: int) -> Any:
        checkpoint.save({"x": dtensor(numbers(8, 4), (2,), [Shard(0)]), "n": 1}, url)
        checkpoint.save({"x": dtensor(numbers(8, 4) + 1, (2,), [Shard(0)]), "n": 2}, url)
        state = {"x": dtensor(torch.zeros(8, 4), (2,), [Shard(1)]), "n": 0}
        checkpoint.load(url, into=state)
        return full(state["x"]).equal(numbers(8, 4) + 1) and state["n"] == 2

    assert run_ranks(2, program) == [True, True]


def test_a_path_that_stands_in_the_other_place(tmp_path: Path) -> None:
    state: Any = {"step": 1}
    with pytest.raises(TypeError, match=r"got dict: the path comes second in save\(state, path\)"):
        checkpoint.read(state)
    with pytest.raises(TypeError, match=r"and first in load\(path, into\)"):
        checkpoint.save(tmp_path, state)


def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty"):
        checkpoint.save({"step": 1}, "")
    with pytest.raises(ValueError, match="the path is empty"):
        checkpoint.read("")
    assert not list(tmp_path.iterdir())
    checkpoint.save({"step": 1}, ".")
    assert checkpoint.read(".") == {"step": 1}
