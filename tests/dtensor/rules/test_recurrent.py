"""Recurrent layers on DTensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.dtensor.op_checks import Layouts, check_op, count_op
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import distribute_tensor, init_device_mesh, manual_seed
from tilework.layout import Replicate, Shard
from tilework.testing import run_ranks

R = Replicate()


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def called(module: nn.Module, *, states: int = 0) -> tuple[Any, list[Tensor]]:
    """A call of a module as a function of its inputs and parameters; each has a copy of it."""
    names = [name for name, _ in module.named_parameters()]

    def fn(input: Tensor, *tensors: Tensor) -> Any:
        given, parameters = tensors[:states], tensors[states:]
        hidden = [tuple(given) if states > 1 else given[0]] if states else []
        return functional_call(
            copy.deepcopy(module), dict(zip(names, parameters, strict=True)), (input, *hidden)
        )

    return fn, [one.detach() for one in module.parameters()]


def batch_cut(dim: int, parameters: list[Tensor], *more: int) -> Any:
    def layouts(shape: tuple[int, ...]) -> list[Layouts]:
        inputs = [[Shard(at)] * len(shape) for at in (dim, *more)]
        whole = [[R] * len(shape)] * len(parameters)
        return [[*inputs, *whole], [inputs[0], *[None] * (len(more) + len(parameters))]]

    return layouts


LAYERS: dict[str, dict[str, Any]] = {
    "one": {},
    "deep": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
}


@each("kind", [nn.LSTM, nn.GRU, nn.RNN])
@each("name", LAYERS)
def test_layers_over_a_cut_batch(kind: Any, name: str) -> None:
    kwargs = LAYERS[name]
    fn, parameters = called(kind(3, 4, dtype=torch.float64, **kwargs))
    dim = 0 if kwargs.get("batch_first") else 1
    shape = (3, 5, 3) if dim == 0 else (5, 3, 3)
    check_op(
        fn,
        drawn(*shape),
        *parameters,
        meshes=[(2,)],
        layouts=batch_cut(dim, parameters),
        gathers=False,
    )


def test_projections_and_states() -> None:
    fn, parameters = called(nn.LSTM(3, 4, proj_size=2, dtype=torch.float64), states=2)
    check_op(
        fn,
        *[drawn(5, 4, 3), drawn(1, 4, 2), drawn(1, 4, 4)],
        *parameters,
        meshes=[(2, 2)],
        layouts=batch_cut(1, parameters, 1, 1),
        gathers=False,
    )


def test_any_layout_of_inputs_and_weights() -> None:
    fn, parameters = called(nn.GRU(3, 4, dtype=torch.float64), states=1)
    check_op(fn, drawn(5, 4, 3), drawn(1, 4, 4), *parameters, meshes=[(2,)], most=4, gathers=False)


@each("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Any) -> None:
    fn, parameters = called(kind(3, 4, dtype=torch.float64))
    check_op(
        fn,
        drawn(4, 3),
        *parameters,
        meshes=[(3,)],
        layouts=batch_cut(0, parameters),
        gathers=False,
    )


def test_a_cut_batch_communicates_gradients_of_weights_alone() -> None:
    fn, parameters = called(nn.LSTM(3, 4, dtype=torch.float64))
    layouts: Layouts = [[Shard(1)], *[[R]] * len(parameters)]
    found = count_op(lambda *x: fn(*x)[0], drawn(5, 4, 3), *parameters, layouts=layouts)
    assert found.forward == []
    assert found.backward == ["all_reduce"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: Any) -> None:
    module = kind(3, 4, dtype=torch.float64)
    inner, parameters = called(module)

    def fn(padded: Tensor, *parameters: Tensor) -> Any:
        packed = pack_padded_sequence(padded, torch.tensor([2, 5, 3]), enforce_sorted=False)
        out, last = inner(packed, *parameters)
        return *pad_packed_sequence(out), last

    check_op(fn, drawn(5, 3, 3), *parameters, meshes=[(2,)], layouts=batch_cut(1, parameters))


def test_what_is_dropped_between_layers_does_not_depend_on_the_layout() -> None:
    module = nn.GRU(3, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=True)
    x, modules = torch.randn(4, 5, 3), [copy.deepcopy(module) for _ in range(2)]

    def program(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for placement in (R, Shard(0), Shard(1)):
            manual_seed(7, mesh)
            out, last = modules[rank](distribute_tensor(x, mesh, [placement]))
            found.append(torch.cat([out.full_tensor().flatten(), last.full_tensor().flatten()]))
        return found

    whole, *others = run_ranks(2, program)[0]
    for other in others:
        assert_close(other, whole)
    plain = torch.cat([one.flatten() for one in module.eval()(x)])
    assert whole.shape == plain.shape
    assert (whole != plain).any()


def test_dropout_between_layers_that_keeps_all_changes_nothing() -> None:
    """Layers one by one give what they give together."""
    module = nn.LSTM(3, 4, num_layers=2, dropout=1e-12, proj_size=2, dtype=torch.float64)
    fn, parameters = called(module)
    check_op(fn, drawn(5, 3, 3), *parameters, meshes=[(2,)], layouts=batch_cut(1, parameters))
