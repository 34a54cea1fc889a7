"""``Shard(dim, turns=2)``: blocks dealt forth and back, in everything that takes a layout."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.dtensor.sharded_values import cut, full, same
from tests.layout.random_tilings import examples
from tilework import checkpoint
from tilework.dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    arange,
    distribute_tensor,
    from_callback,
    local_box,
    rand,
    to_dtensor,
    to_sharded,
    zeros,
)
from tilework.dtensor.debug.causes import explain
from tilework.layout.internal import native_placement
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

TURNS: list[Placement] = [Shard(1, turns=2)]


def cp(length: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (length,), mesh_dim_names=("cp",))


def test_the_word() -> None:
    dealt = Shard(1, turns=2)
    assert repr(dealt) == "Shard(dim=1, turns=2)"
    assert eval(repr(dealt)) == dealt
    assert dealt != Shard(1)
    assert hash(dealt) != hash(Shard(1))
    assert Shard(1, turns=1) == Shard(1)
    assert dealt.is_shard(1)
    assert native_placement(dealt) is dealt
    with pytest.raises(ValueError, match="turns of 1 or more"):
        Shard(0, turns=0)
    with pytest.raises(ValueError, match="sizes=\\(1, 1\\), turns=2"):
        Shard(0, (1, 1), turns=2)
    with pytest.raises(TypeError, match="whole number"):
        Shard(0, turns=2.5)  # type: ignore[arg-type]


@examples()
@given(st.integers(0, 9), st.integers(1, 4))
def test_a_rank_has_the_blocks_that_are_dealt_to_it(rows: int, length: int) -> None:
    blocks = list(torch.split(torch.arange(rows), max(1, -(-rows // (2 * length)))))
    blocks += [torch.arange(0)] * (2 * length - len(blocks))

    def rank(rank: int) -> None:
        x = distribute_tensor(torch.arange(rows), cp(length), [Shard(0, turns=2)])
        own = torch.cat([blocks[rank], blocks[2 * length - 1 - rank]])
        assert torch.equal(x.to_local(), own)
        assert torch.equal(x.full_tensor(), torch.arange(rows))
        made = arange(rows, device_mesh=x.device_mesh, placements=[Shard(0, turns=2)])
        assert torch.equal(made.to_local(), own)
        assert x.placements == (Shard(0, turns=2),) or length == 1

    run_ranks(length, rank)


def test_random_numbers_are_those_of_the_full_tensor() -> None:
    def rank(rank: int) -> None:
        drawn = []
        for placements in ([Replicate()], TURNS, [Shard(0, turns=3)]):
            torch.manual_seed(3)
            drawn.append(rand(5, 7, device_mesh=cp(), placements=placements).full_tensor())
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[0], drawn[2])

    run_ranks(2, rank)


def test_a_block_of_a_model_moves_nothing_along_the_sequence() -> None:
    torch.manual_seed(0)
    tokens, table = torch.randint(0, 11, (2, 12)), torch.randn(11, 6)
    weight, targets = torch.randn(11, 6), torch.randint(0, 11, (2, 12))

    def loss(tokens: Tensor, targets: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        x = F.layer_norm(F.gelu(F.embedding(tokens, table)), (6,))
        logits = F.linear(F.dropout(x, 0.0), weight).transpose(1, 2)
        return F.cross_entropy(logits, targets)

    leaves = [table.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = loss(tokens, targets, *leaves)
    plain.backward()  # type: ignore[no-untyped-call]

    def rank(rank: int) -> None:
        mesh = cp()
        inputs = [cut(x, mesh, TURNS) for x in (tokens, targets)]
        own = [cut(x.detach().requires_grad_(), mesh, [Replicate()]) for x in leaves]
        with explain() as log:
            found = loss(*inputs, *own)
        assert [event.nbytes for event in log.events] == [8]  # the number of targets
        found.backward()  # type: ignore[no-untyped-call]
        same(found, plain)
        for x, leaf in zip(own, leaves, strict=True):
            same(x.grad, leaf.grad)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[:, 1:6],
        lambda x: x[:, 3],
        lambda x: x.cumsum(1),
        lambda x: x.softmax(1),
        lambda x: x.sort(1)[0],
        lambda x: x.argmax(1).double(),
        lambda x: x.unflatten(1, (2, 5)),
        lambda x: x.flatten(),
        lambda x: x.tril(),
        lambda x: x.roll(2, 1),
        lambda x: F.pad(x, (1, 2)),
        lambda x: torch.cat([x, x], 1),
        lambda x: F.scaled_dot_product_attention(
            x.mT[None], x.mT[None], x.mT[None], is_causal=True
        ),
    ],
)
def test_what_looks_along_the_dim_gives_plain_values_and_gradients(look: Any) -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    want = look(whole)
    if want.requires_grad:
        want.square().sum().backward()

    def rank(rank: int) -> None:
        x = cut(whole, cp(), TURNS)
        found = look(x)
        same(found, want)
        if want.requires_grad:
            found.square().sum().backward()
            assert x.grad.placements == (Shard(1, turns=2),)
            same(x.grad, whole.grad)

    run_ranks(2, rank)


def test_writes_reach_the_tensor_through_ranges_and_views() -> None:
    def write(x: Tensor) -> None:
        x[:, 2:7] = 5.0
        x[0] *= 2
        x[:, 1].fill_(7.0)
        x[1:, 3:].add_(1.0)

    whole = torch.arange(30.0).view(3, 10)
    plain = whole.clone()
    write(plain)

    def rank(rank: int) -> None:
        x = cut(whole, cp(), TURNS)
        write(x)
        assert x.placements == (Shard(1, turns=2),)
        same(x, plain)

    run_ranks(2, rank)


def test_local_tensors_become_a_tensor_and_a_sharded_tensor() -> None:
    whole = torch.arange(14.0).view(2, 7)

    def rank(rank: int) -> None:
        mesh, x = cp(), cut(whole, cp(), TURNS)
        again = DTensor.from_local(x.to_local(), mesh, TURNS)
        assert again.shape == (2, 7)
        assert torch.equal(full(again), whole)
        made = from_callback((2, 7), mesh, TURNS, lambda box: whole[box.slices])
        assert torch.equal(full(made), whole)
        with pytest.raises(ValueError, match="redistribute it to Shard without turns"):
            to_sharded(x)
        sharded = to_sharded(x := cut(whole.T.contiguous(), mesh, [Shard(0, turns=2)]))
        assert len(sharded.local_shards()) == 2
        sharded.local_shards()[1].tensor.fill_(9)  # the same memory
        assert (x.to_local() == 9).any()
        with pytest.raises(ValueError, match="several shards on rank 0: reshard it"):
            to_dtensor(sharded, mesh)
        with pytest.raises(ValueError, match=r"2 parts .* local_boxes\(\)"):
            local_box((2, 7), mesh, TURNS)
        with pytest.raises(ValueError, match="do not form one tensor"):
            DTensor.from_local(torch.zeros(2, 1 + 4 * rank), mesh, TURNS)

    run_ranks(2, rank)


def test_copies_files_and_checkpoints_keep_it(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(3, 8)

    def rank(rank: int) -> None:
        mesh, x = cp(), cut(whole, cp(), TURNS)
        saved = io.BytesIO()
        torch.save(x, saved)
        saved.seek(0)
        for twin in (copy.deepcopy(x), torch.load(saved), pickle.loads(pickle.dumps(x))):
            assert twin.placements == x.placements
            assert torch.equal(full(twin), whole)
        checkpoint.save({"x": x, "y": cut(whole, mesh, [Shard(0)])}, tmp_path / "state")
        state = {
            "x": zeros(3, 8, device_mesh=mesh, placements=[Shard(1)]),
            "y": zeros(3, 8, device_mesh=mesh, placements=TURNS),
        }
        checkpoint.load(tmp_path / "state", state)
        assert torch.equal(full(state["x"]), whole)
        assert torch.equal(full(state["y"]), whole)

    run_ranks(2, rank)


def test_other_libraries_and_plans_refuse_it_by_name() -> None:
    from tilework.parallel import ColwiseParallel

    with pytest.raises(ValueError, match="not dealt in turns"):
        ColwiseParallel(output_layouts=Shard(-1, turns=2))

    def rank(rank: int) -> str:
        from tilework.dtensor.torch_tensors import torch_placements

        x = cut(torch.ones(2, 8), cp(), TURNS)
        with pytest.raises(ValueError, match=r"turns=2.*redistribute\(\) it to Shard\(1\)"):
            torch_placements(x._spec)
        return repr(x)

    assert run_ranks(2, rank)[0] == "DTensor f32[2, 8@cp(2 turns)] on cpu mesh cp=2"
