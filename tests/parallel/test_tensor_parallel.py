"""Tensor parallelism from plans, against the plain module: values, gradients, collectives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dtensor.sharded_values import collectives, cut, full, same
from tilework.dtensor import (
    DTensor,
    GatherWarning,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
    strict,
)
from tilework.mesh import DeviceMesh
from tilework.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
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


def check_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, found), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, name
        assert wanted.grad is not None, name
        grad = full(found.grad) if isinstance(found.grad, DTensor) else found.grad
        told = f"{name}: {{}}".format
        torch.testing.assert_close(grad, wanted.grad, msg=told)


def square(output: Any) -> Any:
    return output.square().sum()


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
        torch.testing.assert_close(found, wanted)
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
        torch.testing.assert_close(full(loss), wanted)
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


# -- single layers ---------------------------------------------------------------------------

LAYERS: dict[str, tuple[nn.Module, ParallelStyle, Tensor, Placement, Placement]] = {
    # A layer, its style, its input and how that lies, and how the output is to lie.
    "colwise": (nn.Linear(3, 5), ColwiseParallel(), torch.randn(4, 3), Replicate(), Shard(-1)),
    "colwise of rows": (
        nn.Linear(3, 5),
        ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
        torch.randn(5, 3),
        Shard(0),
        Shard(0),
    ),
    "colwise without bias": (
        nn.Linear(3, 1, bias=False),
        ColwiseParallel(output_layouts=Replicate()),
        torch.randn(4, 3),
        Replicate(),
        Replicate(),
    ),
    "rowwise": (nn.Linear(5, 3), RowwiseParallel(), torch.randn(4, 5), Shard(-1), Replicate()),
    "rowwise of all": (
        nn.Linear(5, 3),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        torch.randn(3, 5),
        Replicate(),
        Shard(0),
    ),
    "rowwise terms": (
        nn.Linear(4, 3),
        RowwiseParallel(output_layouts=Partial()),
        torch.randn(4, 4),
        Shard(-1),
        Partial(),
    ),
    "colwise table": (
        nn.Embedding(5, 3),
        ColwiseParallel(),
        torch.tensor([[0, 4, 2], [2, 2, 1]]),
        Replicate(),
        Shard(-1),
    ),
    "rowwise table": (
        nn.Embedding(5, 3, padding_idx=2),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        torch.tensor([[0, 4, 2], [2, 2, 1]]),
        Replicate(),
        Shard(1),
    ),
    "sequence": (
        nn.LayerNorm(3),
        SequenceParallel(sequence_dim=0, use_local_output=True),
        torch.randn(5, 3),
        Shard(0),
        Shard(0),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_plain_tensors(name: str) -> None:
    """Its input and its output are this rank's parts; so is the input's gradient."""
    layer, style, x, given, out = LAYERS[name]
    of_input = x.clone().requires_grad_(x.is_floating_point())
    plain = copy.deepcopy(layer)
    wanted = plain(of_input)
    square(wanted).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = parallelize_module(copy.deepcopy(layer), mesh, style)
        part = cut(x, mesh, [given]).to_local().detach()
        part.requires_grad_(x.is_floating_point())
        found = module(part)
        assert not isinstance(found, DTensor)
        output = DTensor.from_local(found, mesh, [out])
        torch.testing.assert_close(full(output), wanted.detach())
        square(output).backward()
        check_gradients(module, plain)
        if part.grad is not None and of_input.grad is not None:
            same(DTensor.from_local(part.grad, mesh, [given]), of_input.grad)

    run_ranks(2, program)


def test_a_dtensor_is_moved_to_where_the_layer_wants_it() -> None:
    layer, x = nn.Linear(4, 6), torch.randn(5, 4)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for style in (
            ColwiseParallel(use_local_output=False),
            RowwiseParallel(use_local_output=False),
            SequenceParallel(sequence_dim=0),
        ):
            module = parallelize_module(copy.deepcopy(layer), mesh, style)
            for given in (Shard(0), Shard(1), Replicate(), Partial()):
                tensor = cut(x, mesh, [Replicate()]).redistribute(placements=[given])
                same(module(tensor), layer(x))
            if not isinstance(style, SequenceParallel):
                same(module(input=cut(x, mesh, [Shard(0)])), layer(x))

    run_ranks(2, program)


# -- inputs and outputs ----------------------------------------------------------------------


class Several(nn.Module):
    """Takes and gives more than tensors."""

    def forward(self, x: Any, factor: Any, *, bias: Any, name: str = "") -> Any:
        return x * factor + bias, name


def test_inputs_and_outputs_of_several_kinds() -> None:
    x, bias = torch.randn(4, 2), torch.randn(4, 2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"bias": Shard(0)},
            desired_input_kwarg_layouts={"bias": Replicate()},
            use_local_input=True,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(1), None),
        )
        module = parallelize_module(Several(), mesh, style)
        rows = slice(2 * rank, 2 * rank + 2)
        found, name = module(x[rows], 3, bias=bias[rows], name="kept")
        torch.testing.assert_close(found, (x * 3 + bias)[:, rank : rank + 1])
        assert name == "kept"

    run_ranks(2, program)


def test_an_output_that_is_to_stay_a_dtensor() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        style = PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Shard(0), use_local_output=False
        )
        found = parallelize_module(nn.Identity(), mesh, style)(torch.ones(3, 2))
        assert found.placements == (Shard(0),)
        same(found, torch.full((3, 2), 2.0))

    run_ranks(2, program)


# -- plans -----------------------------------------------------------------------------------


def alone(program: Callable[[DeviceMesh], Any]) -> Any:
    """On a mesh of one rank."""
    return run_ranks(1, lambda rank: program(init_device_mesh("cpu", (1,))))[0]


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
        with pytest.raises(ValueError, match=r"Shard\(dim=1\) and .* of one parameter, 'weight'"):
            parallelize_module(
                model,
                mesh,
                {**fine, "embed": ColwiseParallel(), "head": ColwiseParallel()},
            )
        with pytest.raises(TypeError, match="a plan is a ParallelStyle, or a dict"):
            parallelize_module(model, mesh, [fine])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'norm': 'rowwise'"):
            parallelize_module(model, mesh, {**fine, "norm": "rowwise"})  # type: ignore[dict-item]
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
        with pytest.raises(ValueError, match="none named 'tp': pass axis="):
            parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
        with pytest.raises(RuntimeError, match="No device mesh is currently active"):
            parallelize_module(nn.Linear(2, 2), None, ColwiseParallel())
        with mesh:
            layer: Any = parallelize_module(nn.Linear(2, 2), None, ColwiseParallel(), axis=1)
        assert layer.weight.placements == (Replicate(), Shard(0))

    run_ranks(1, program)


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="should have same length"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Shard(0))
    with pytest.raises(ValueError, match=r"name the same inputs, got \['x'\] and \[\]"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)})
    with pytest.raises(ValueError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), None))
    with pytest.raises(TypeError, match="a layout is one placement"):
        ColwiseParallel(input_layouts=[Shard(0)])  # type: ignore[arg-type]

    def program(mesh: DeviceMesh) -> None:
        whole = PrepareModuleInput(
            input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Replicate(), Replicate())
        )
        module = parallelize_module(nn.Bilinear(2, 2, 2), mesh, whole)
        with pytest.raises(ValueError, match="1 inputs of Bilinear, but 2 input_layouts"):
            module(torch.ones(2, 2))
        with pytest.raises(
            TypeError, match=r"input 1 of Bilinear has the layout .* no tensor: int"
        ):
            module(torch.ones(2, 2), 3)
        with pytest.raises(TypeError, match=r"input of LayerNorm has .* no tensor: NoneType"):
            parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())(None)
        other = DeviceMesh("cpu", [[0]])
        layer = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
        with pytest.raises(ValueError, match="distribute both over one mesh"):
            layer(cut(torch.ones(2, 2), other, [Replicate()] * 2))

    alone(program)


def test_a_style_of_your_own() -> None:
    """A convolution whose output channels are cut."""

    class Channels(ParallelStyle):
        def parameter_layouts(self, module: nn.Module) -> dict[str, Any]:
            return {"weight": Shard(0), "bias": Shard(0)}

        def attach(self, module: nn.Module, axis: Any) -> None:
            module.register_forward_hook(lambda _, inputs, out: axis.move(out, Replicate()))

    layer, x = nn.Conv1d(2, 3, 1), torch.randn(2, 2, 4)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)
            same(parallelize_module(copy.deepcopy(layer), mesh, Channels())(x), layer(x))

    run_ranks(2, program)


def test_styles_say_what_they_are() -> None:
    assert repr(ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(dim=-1), "
        "use_local_output=True)"
    )
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    assert "desired_output_layouts=(Shard(dim=0),)" in repr(
        PrepareModuleInputOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    )


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


# -- losses ----------------------------------------------------------------------------------


def test_loss_parallel_gathers_no_logits() -> None:
    logits, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 4, 2, -100, 1, 3])
    wanted: Any = F.cross_entropy(logits, targets)
    wanted.backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(logits, mesh, [Shard(1)])
        with loss_parallel():
            loss: Any = F.cross_entropy(x, targets)
            loss.backward()
            same(loss, wanted)
            same(x.grad, logits.grad)
            with collectives() as used:
                F.cross_entropy(x, targets)
            assert set(used) == {"all_reduce"}
            with pytest.raises(NotImplementedError, match="unique has no rule"):
                torch.unique(x.detach())

    run_ranks(2, program)
