"""Styles of single layers: inputs, outputs and gradients, against the plain layer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.sharded_values import cut, full, same
from tests.parallel.tensor_parallel.plain_modules import alone, check_gradients, square
from tests.rounding import assert_close
from tilework.dtensor import (
    DTensor,
    GatherWarning,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
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
    parallelize_module,
)
from tilework.testing import run_ranks

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
        assert_close(full(output), wanted.detach())
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
        assert_close(found, (x * 3 + bias)[:, rank : rank + 1])
        assert name == "kept"

    run_ranks(2, program)


def test_several_outputs_on_a_slice_of_the_sequence() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x + 1, None

    rows = torch.ones(1, 2, 3)

    def program(rank: int) -> None:
        style = SequenceParallel(use_local_output=True)
        found, nothing = parallelize_module(Pair(), init_device_mesh("cpu", (2,)), style)(rows)
        assert not isinstance(found, DTensor)
        assert torch.equal(found, rows + 1)
        assert nothing is None

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


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="should have same length"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Shard(0))
    with pytest.raises(ValueError, match=r"name the same inputs, got \['x'\] and \[\]"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)})
    with pytest.raises(ValueError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), None))
    with pytest.raises(TypeError, match="a layout is a single placement"):
        ColwiseParallel(input_layouts=[Shard(0)])  # type: ignore[arg-type]

    def program(mesh: DeviceMesh) -> None:
        whole = PrepareModuleInput(
            input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Replicate(), Replicate())
        )
        module = parallelize_module(nn.Bilinear(2, 2, 2), mesh, whole)
        with pytest.raises(ValueError, match="1 inputs of Bilinear, but 2 input_layouts"):
            module(torch.ones(2, 2))
        with pytest.raises(
            TypeError, match=r"input 1 of Bilinear has the layout .* not a tensor: int"
        ):
            module(torch.ones(2, 2), 3)
        with pytest.raises(TypeError, match=r"input of LayerNorm has .* not a tensor: NoneType"):
            parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())(None)
        with pytest.raises(
            TypeError, match=r"SequenceParallel takes .* by name, \['input'\]: pass"
        ):
            parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())(input=torch.ones(2, 2))
        other = DeviceMesh("cpu", [[0]])
        layer = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
        with pytest.raises(ValueError, match="distribute both over one mesh"):
            layer(cut(torch.ones(2, 2), other, [Replicate()] * 2))

    alone(program)


@pytest.mark.parametrize("columns", [4, 3])
def test_an_input_with_other_features_is_told(columns: int) -> None:
    """As where the layer before it is not in the plan, so that each rank has all features."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = parallelize_module(nn.Linear(4, 2), mesh, RowwiseParallel())
        with pytest.raises(ValueError, match=f"takes 4 features.* gave {2 * columns}: .*Replicate"):
            layer(torch.ones(5, columns))
        with pytest.raises(ValueError, match="has 6 features, and the layer takes 4"):
            layer(cut(torch.ones(5, 6), mesh, [Shard(1)]))
        assert layer(torch.ones(5, 2)).shape == (5, 2)

    run_ranks(2, program)


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
