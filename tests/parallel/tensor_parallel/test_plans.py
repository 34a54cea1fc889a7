"""Whole models made parallel by a plan: values, gradients and collectives, against plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dtensor.sharded_values import collectives, cut, full
from tests.parallel.tensor_parallel.plain_modules import alone, check_gradients, square
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Replicate, Shard, init_device_mesh, strict
from tilework.mesh import DeviceMesh
from tilework.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tilework.testing import run_ranks

torch.manual_seed(5)
WIDTH, HEADS, BYTES = 6, 3, 7


class Attention(nn.Module):
    """Local heads if its layers give local tensors: it asks no tensor for a global shape."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Two blocks; the table of the bytes is that of the scores, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODEL = Model()
TOKENS = torch.randint(BYTES, (4, 6))
#: Three heads over two ranks: two, and one.
UNEVEN = Shard(-1, sizes=(4, 2))

Plan = dict[str, ParallelStyle]


def megatron(heads: Any) -> Plan:
    """Heads and features are cut, all else is replicated; between layers tensors are plain."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.[qkv]": ColwiseParallel(output_layouts=heads),
        "blocks.*.attention.out": RowwiseParallel(input_layouts=heads),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence(heads: Any) -> Plan:
    """The same, and what is between is cut along the sequence; all tensors are DTensors."""
    out: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), **out),
        "blocks.*.norm_?": SequenceParallel(),
        "blocks.*.attention": whole,
        "blocks.*.attention.[qkv]": ColwiseParallel(output_layouts=heads, use_local_output=False),
        "blocks.*.attention.out": RowwiseParallel(input_layouts=heads, **out),
        "blocks.*.mlp": whole,
        "blocks.*.mlp.0": ColwiseParallel(use_local_output=False),
        "blocks.*.mlp.2": RowwiseParallel(**out),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def loss_of(logits: Any, tokens: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def plain_step(module: nn.Module, *inputs: Tensor, loss: Callable[..., Any]) -> tuple[Any, Any]:
    """A copy's loss, and the copy with gradients."""
    copied = copy.deepcopy(module)
    found = loss(copied(*inputs))
    found.backward()
    return found.detach(), copied


# -- whole models ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("plan", [megatron, sequence])
def test_a_model_computes_what_the_plain_one_does(plan: Callable[[Any], Plan], ranks: int) -> None:
    wanted, plain = plain_step(MODEL, TOKENS, loss=lambda logits: loss_of(logits, TOKENS))
    heads = UNEVEN if ranks == 2 else Shard(-1)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        model: Any = parallelize_module(copy.deepcopy(MODEL), mesh, plan(heads))
        loss = loss_of(model(TOKENS), TOKENS)
        loss.backward()
        found = full(loss) if isinstance(loss, DTensor) else loss.detach()
        assert_close(found, wanted)
        check_gradients(model, plain)
        assert model.head.weight is model.embed.weight

    run_ranks(ranks, program)


def test_a_plan_for_one_axis_of_two() -> None:
    """The other axis splits the batch: three rows are two, and one."""
    tokens = TOKENS[:3]
    wanted, plain = plain_step(MODEL, tokens, loss=lambda logits: loss_of(logits, tokens))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = parallelize_module(copy.deepcopy(MODEL), mesh, sequence(UNEVEN))
        assert all(isinstance(one, DTensor) for one in model.parameters())
        rows = cut(tokens, mesh, [Shard(0), Replicate()])
        with strict():
            loss = loss_of(model(rows), rows)
            loss.backward()
        assert_close(full(loss), wanted)
        check_gradients(model, plain)

    run_ranks(4, program)


def test_plain_rows_on_a_mesh_of_two_axes() -> None:
    """Plain tensors are each rank's rows. Gradients then add up over the ranks' own losses."""
    mlp = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(5, 3)
    _, plain = plain_step(mlp, x, loss=square)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = parallelize_module(copy.deepcopy(mlp), mesh, plan, axis="model")
        rows = x.tensor_split([3])[mesh.get_local_rank("data")]
        square(module(rows)).backward()
        check_gradients(module, plain)

    run_ranks(4, program)


def test_the_plan_s_axis_as_a_mesh_of_its_own() -> None:
    mlp = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(5, 3)
    _, plain = plain_step(mlp, x, loss=square)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module: Any = parallelize_module(copy.deepcopy(mlp), mesh["tp"], plan)
        assert module[0].weight.device_mesh == mesh["tp"]
        square(module(x)).backward()
        check_gradients(module, plain)

    run_ranks(4, program)


# -- what is sent ----------------------------------------------------------------------------


def sent(module: nn.Module, x: Any) -> tuple[list[str], list[str]]:
    """The collectives of a forward and a backward pass, when layouts are agreed upon."""
    square(module(x)).backward()
    with collectives() as forward:
        loss = square(module(x))
    with collectives() as backward:
        loss.backward()
    return forward, backward


def test_an_mlp_reduces_once_forward_and_once_backward() -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return sent(mlp, torch.ones(6, 4, requires_grad=True))

    assert run_ranks(2, program) == [(["all_reduce"], ["all_reduce"])] * 2


def test_sequence_parallel_gathers_and_scatters() -> None:
    """In backward the other way round; gradients of replicated parameters are reduced together."""

    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        return sent(block, cut(torch.ones(2, 6, 4, requires_grad=True), mesh, [Shard(1)]))

    forward = ["all_gather", "reduce_scatter"]
    assert run_ranks(2, program)[0] == (forward, [*forward, "all_reduce"])


def test_layers_share_one_gathered_input() -> None:
    """q, k and v take one input: gathered once, and the terms of its gradient scattered once."""

    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (3,))
        attention = Attention()
        plan: Plan = {
            "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "[qkv]": ColwiseParallel(use_local_output=False),
            "out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(attention, mesh, plan)
        return sent(attention, cut(torch.ones(2, 6, WIDTH, requires_grad=True), mesh, [Shard(1)]))

    forward, backward = run_ranks(3, program)[0]
    assert forward == backward == ["all_gather", "reduce_scatter"]


# -- plans -----------------------------------------------------------------------------------


def test_names_with_wildcards() -> None:
    def program(mesh: DeviceMesh) -> set[str]:
        model = copy.deepcopy(MODEL)
        parallelize_module(model, mesh, {"blocks.[0-9].*.o?t": RowwiseParallel()})
        return {name for name, one in model.named_parameters() if isinstance(one, DTensor)}

    layers = {f"blocks.{number}.attention.out" for number in (0, 1)}
    assert alone(program) == {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}


def test_a_name_that_fits_nothing_is_told_with_those_there_are() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(MODEL)
        with pytest.warns(UserWarning, match=r"'blocks\.\*\.atention\.q' .* blocks\.0\.attention"):
            parallelize_module(model, mesh, {"blocks.*.atention.q": ColwiseParallel()})
        with pytest.warns(UserWarning, match="'1' of the plan .* no submodules at all"):
            parallelize_module(nn.Linear(2, 2), mesh, {"1": ColwiseParallel()})
        with pytest.warns(UserWarning, match="without a plan changes nothing"):
            parallelize_module(model, mesh)
        assert not any(isinstance(one, DTensor) for one in model.parameters())

    alone(program)


def test_a_wrong_plan_changes_nothing() -> None:
    def program(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(MODEL)
        fine = {"blocks.0.mlp.0": ColwiseParallel()}
        with pytest.raises(NotImplementedError, match=r"nn\.Linear and .*, not GELU"):
            parallelize_module(model, mesh, {**fine, "blocks.*.mlp.1": ColwiseParallel()})
        with pytest.raises(NotImplementedError, match="not Attention"):
            parallelize_module(model, mesh, {**fine, "blocks.*.attention": RowwiseParallel()})
        with pytest.raises(ValueError, match=r"Shard\(dim=1\) and .* of the same parameter"):
            parallelize_module(
                model,
                mesh,
                {**fine, "embed": ColwiseParallel(), "head": ColwiseParallel()},
            )
        with pytest.raises(TypeError, match="a plan must be a ParallelStyle, or a dict"):
            parallelize_module(model, mesh, [fine])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'norm': 1"):
            parallelize_module(model, mesh, {**fine, "norm": 1})  # type: ignore[dict-item]
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        assert not any(one._forward_hooks for one in model.modules())

    alone(program)


def test_a_parameter_that_lies_otherwise_already() -> None:
    def program(mesh: DeviceMesh) -> None:
        layer: Any = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        with pytest.raises(ValueError, match="to a different placements"):
            parallelize_module(layer, mesh, RowwiseParallel())

    alone(program)


def test_the_mesh_s_axis_has_to_be_told() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "model"))
        with pytest.raises(ValueError, match="none is named 'tp': pass axis="):
            parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
        with pytest.raises(RuntimeError, match="No device mesh is currently active"):
            parallelize_module(nn.Linear(2, 2), None, ColwiseParallel())
        with mesh:
            layer: Any = parallelize_module(nn.Linear(2, 2), None, ColwiseParallel(), axis=1)
        assert layer.weight.placements == (Replicate(), Shard(0))

    run_ranks(1, program)


def test_frozen_parameters_and_modules_on_meta() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        frozen: Any = nn.Linear(4, 4).requires_grad_(False)
        parallelize_module(frozen, mesh, ColwiseParallel())
        assert not frozen.weight.requires_grad
        meta: Any = parallelize_module(nn.Linear(4, 4, device="meta"), mesh, ColwiseParallel())
        assert meta.weight.is_meta
        assert meta.weight.to_local().shape == (2, 4)

    run_ranks(2, program)


def test_a_weight_that_a_parametrization_computes() -> None:
    def program(rank: int) -> None:
        mesh, x = init_device_mesh("cpu", (2,)), torch.ones(2, 4)
        plain = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        style = ColwiseParallel(output_layouts=Replicate())
        assert_close(parallelize_module(copy.deepcopy(plain), mesh, style)(x), plain(x))
        with pytest.raises(ValueError, match=r"no parameter 'weight'.*\nIt has bias, parametriz"):
            parallelize_module(plain, mesh, RowwiseParallel())

    torch.manual_seed(0)
    run_ranks(2, program)
