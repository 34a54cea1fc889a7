"""Questions about a tensor, which no elements are needed for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.dlpack
from torch import nn

from tests.rounding import assert_close
from tests.tables import each
from tilework.comm.world import current_world
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
    strict,
)
from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tilework.testing import run_ranks

ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_cuda"),
    *("is_sparse", "is_quantized", "is_meta", "is_leaf", "requires_grad", "names", "output_nr"),
)
METHODS = (
    *("size", "dim", "numel", "element_size", "is_contiguous", "is_floating_point"),
    *("is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "is_pinned", "type"),
    *("storage_offset", "_is_view", "_is_zerotensor", "is_distributed", "dense_dim"),
    *("dim_order", "get_device", "stride"),
)
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: operator.attrgetter(name) for name in ATTRIBUTES},
    **{name: operator.methodcaller(name) for name in METHODS},
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "result_type": lambda x: torch.result_type(x, x.double()),
    "result_type with a number": lambda x: torch.result_type(x, 3),
    "is_set_to": lambda x: x.is_set_to(x),
    "may be data": lambda x: torch._has_compatible_shallow_copy_type(x, x),
    "is_same_size": lambda x: x.is_same_size(x),
}


@each("placement", [Replicate(), Shard(0), Shard(1), Partial()])
def test_parts_of_numbers_that_are_set_are_written_to(placement: Placement) -> None:
    whole = torch.arange(4.0).view(2, 2)

    def results(x: Any) -> list[Any]:
        z = torch.complex(x, x)
        z.real = z.imag * 2
        z.imag += 1
        z[0].real = x[1]
        x.real += 3
        with pytest.raises(RuntimeError):
            x.imag = x
        return [z, x]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        made = results(distribute_tensor(whole, mesh, [placement]))
        for got, expected in zip(made, results(whole.clone()), strict=True):
            assert torch.equal(got.full_tensor(), expected)

    run_ranks(2, program)


@each("placement", [Replicate(), Shard(0), Shard(1)])
def test_the_base_of_a_view_is_the_tensor_that_is_none(placement: Placement) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [placement])
        row = x[0]
        assert row._base is x
        assert row[1:]._base is x
        x.t_()
        assert x[1]._base is x
        assert all(each._base is None for each in (x, x.detach(), x[1] * 2, x.clone()))

    run_ranks(2, program)


@each("placement", [Replicate(), Shard(0), Shard(1)])
def test_views_made_before_data_of_inference_mode_are_none(placement: Placement) -> None:
    def answers(x: Any) -> list[bool]:
        before = x.diagonal()
        with torch.inference_mode():
            x.data = x.data.clone()
        shown = (before, before[1:], x, x.diagonal(), x[0], x.detach())
        return [tensor.is_inference() for tensor in shown]

    expected = answers(torch.ones(4, 4))

    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [placement])
        assert answers(x) == expected

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
@each("name", QUESTIONS | OTHERS)
def test_questions_communicate_nothing(name: str) -> None:
    ask = (QUESTIONS | OTHERS)[name]

    def answer(x: Any) -> Any:
        try:
            return ask(x)
        except (AttributeError, RuntimeError):
            return "none"

    expected = answer(torch.ones(4, 3))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Partial()):
            x = distribute_tensor(torch.ones(4, 3), mesh, [placement])
            with explain() as log, strict():
                found = answer(x)
            assert not log.events
            assert found == expected or (name == "names" and found == "none")
        before = [len(group.flight_entries()) for group in current_world().records]
        answer(x)
        assert [len(group.flight_entries()) for group in current_world().records] == before

    run_ranks(2, program)


@each(
    "convert",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.type(torch.float64),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to_empty(device="cpu"),
    ],
)
def test_a_module_is_converted_where_it_is(convert: Callable[[nn.Module], nn.Module]) -> None:
    """Each rank converts its shards: neither bytes nor memory for more."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model(torch.ones(2, 8)).sum().backward()
        plain = {name: p.to(p.dtype).full_tensor() for name, p in _tensors(model).items()}
        layouts = {name: p.placements for name, p in _tensors(model).items()}
        before = sum(len(group.flight_entries()) for group in current_world().records)
        convert(model)
        assert sum(len(group.flight_entries()) for group in current_world().records) == before
        for name, p in _tensors(model).items():
            assert isinstance(p, DTensor)
            assert p.placements == layouts[name]
            local = p.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes
            if "to_empty" not in convert.__code__.co_names:
                assert_close(p.full_tensor(), plain[name].to(p.dtype))

    run_ranks(2, program)


def _tensors(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = dict(model.named_parameters())
    return found | {f"{name}.grad": p.grad for name, p in model.named_parameters()}


def test_no_capsule_is_made_of_a_dtensor() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        for module, name in ((torch, "to"), (torch, "from"), (torch.utils.dlpack, "to")):
            with pytest.raises(TypeError, match=r"full_tensor\(\)"):
                getattr(module, f"{name}_dlpack")(x)

    run_ranks(2, program)
    plain = torch.ones(3)
    for module in (torch, torch.utils.dlpack):
        shown: Any = module
        assert shown.from_dlpack(shown.to_dlpack(plain)).data_ptr() == plain.data_ptr()


def _asarray_writes(x: Any) -> Any:
    torch.asarray(x).add_(1)
    return x


def _asarray_copies(x: Any) -> Any:
    torch.asarray(x, copy=True).add_(1)
    return x


@each(
    "call",
    [
        *(_asarray_writes, _asarray_copies, lambda x: torch.asarray(x, dtype=torch.float64)),
        *(
            lambda x: torch.asarray(x, requires_grad=True),
            lambda x: torch.asarray(x.requires_grad_()),
        ),
        lambda x: torch.asarray(x.requires_grad_() * 2),
        lambda x: torch.asarray(x.requires_grad_() * 2, requires_grad=True),
    ],
)
def test_asarray(call: Callable[[Any], Any]) -> None:
    plain = call(torch.arange(3.0))

    def program(rank: int) -> None:
        x = distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        found = call(x)
        assert (found.requires_grad, found.is_leaf) == (plain.requires_grad, plain.is_leaf)
        assert_close(found.detach().full_tensor(), plain.detach())
        with pytest.raises(ValueError, match="it has to be copied"):
            torch.asarray(x, dtype=torch.int32, copy=False)

    run_ranks(2, program)


@pytest.mark.parametrize("several", [False, True])
def test_a_write_that_the_program_counts_itself(several: bool) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_() * 1
        y = (x * x).sum()
        torch.autograd.graph.increment_version([x] if several else x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, program)


@each(
    "call",
    [
        lambda x: x.as_strided((2, 2), (2, 1)),
        lambda x: torch.as_strided_copy(x, (2, 2), (2, 1)),
        lambda x: torch.as_strided_scatter(torch.ones(4), x, (2, 2), (2, 1)),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.resize_(2),
        lambda x: torch.ops.aten.resize_(x, [4]),
    ],
)
def test_memory_of_several_ranks_has_no_strides(call: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [placement])
            with pytest.raises(TypeError, match="asks for the memory of"):
                call(x)
            assert x.shape == (2, 2)

    run_ranks(2, program)
