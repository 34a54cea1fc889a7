"""What the DTensor API does: distribute_tensor, distribute_module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.sharded_values import collectives, cut
from tests.dtensor.test_from_local import LAYOUTS, raised_by_all
from tests.tables import each
from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks


class Model(nn.Module):
    """Two linear layers, of which tests distribute some."""

    def __init__(self, features: int, out: int, device: str = "cpu") -> None:
        super().__init__()
        self.seq = nn.Sequential(
            nn.Linear(features, out, device=device),
            nn.ReLU(),
            nn.Linear(out, features, device=device),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.seq(x)
        return found


# -- distribute_tensor -----------------------------------------------------------------------


def test_each_rank_gets_its_part_of_the_first_ranks_values() -> None:
    def program(rank: int) -> None:
        meshes = {(4,): init_device_mesh("cpu", (4,)), (2, 2): init_device_mesh("cpu", (2, 2))}
        for shape, size, placements, order in LAYOUTS:
            whole = torch.arange(float(torch.Size(size).numel())).reshape(size)
            given = whole if rank == 0 else whole + rank
            for source in (0, 1, None):
                if source is not None:
                    at = meshes[shape].spec.at((source,) * len(shape))
                    given = whole if rank == at else torch.empty(size, device="meta")
                else:
                    given = whole
                found = distribute_tensor(
                    given, meshes[shape], placements, src_data_rank=source, order=order
                )
                assert found.shape == whole.shape
                assert torch.equal(found.full_tensor(), whole), (placements, order, source)
                local = found.to_local()
                assert local.is_contiguous()
                assert local.shape == found._spec.local_shape

    run_ranks(4, program)


def test_tensors_that_were_alike_before_are_compared_again() -> None:
    def program(rank: int) -> None:
        mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(6.0).view(2, 3)
        for given in (whole, whole.t().contiguous().t() if rank else whole):
            found = distribute_tensor(given, mesh, [Shard(0)])
            assert found.stride() == (3, 1)
            assert torch.equal(found.full_tensor(), whole)
        with pytest.raises(ValueError, match="dtype"):
            distribute_tensor(whole.double() if rank else whole, mesh, [Shard(0)])

    run_ranks(2, program)


def test_gradients_stay_with_the_parts() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        for source in (0, None):
            for requires_grad in (True, False):
                whole = torch.randn(12, 3, requires_grad=requires_grad)
                found = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source)
                assert found.size() == torch.Size([12, 3])
                assert found.to_local().size() == torch.Size([3, 3])
                assert (found.requires_grad, found.is_leaf) == (requires_grad, True)
        columns = distribute_tensor(torch.randn(3, 12), mesh, [Shard(-1)])
        assert columns.placements == (Shard(1),)

    run_ranks(4, program)


@each("dim", [0, 1, 2])
@each("more", [1, 2])
def test_uneven_parts_are_those_of_chunk(dim: int, more: int) -> None:
    size = [3, 3, 3]
    size[dim] = 4 * 3 + more
    whole = torch.randn(size)

    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))
        found = distribute_tensor(whole, mesh, [Shard(dim)])
        assert found.size() == torch.Size(size)
        assert torch.equal(found.to_local(), torch.chunk(whole, 4, dim)[rank])

    run_ranks(4, program)


def test_what_cannot_be_distributed_raises_on_all_ranks() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        whole = torch.randn(12, 12)
        with pytest.raises(ValueError, match="must have the same length"):
            distribute_tensor(whole, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="distribute leaf tensor"):
            distribute_tensor(whole.requires_grad_() + 2, mesh, [Shard(0), Shard(1)])
        whole = whole.detach()
        there = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert distribute_tensor(there, mesh, [Shard(0), Shard(1)]) is there
        with pytest.raises(ValueError, match="to a different device mesh"):
            distribute_tensor(there, DeviceMesh("cpu", torch.arange(4)), [Shard(0)])
        with pytest.raises(ValueError, match="to a different placements"):
            distribute_tensor(there, mesh, [Shard(0), Replicate()])
        with pytest.raises(ValueError, match="src_data_rank=2"):
            distribute_tensor(whole, mesh, src_data_rank=2)
        with pytest.raises(TypeError, match=r"src_data_rank .*; got 0\.5"):
            distribute_tensor(whole, mesh, src_data_rank=0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="dim"):
            distribute_tensor(whole, mesh, [Shard(2), Shard(0)])
        with pytest.raises(ValueError, match="has no dim 0: it has none"):
            distribute_tensor(whole.sum(), mesh, [Shard(0), Replicate()])
        nested = torch.nested.nested_tensor([whole], layout=torch.jagged)
        for refused in (distribute_tensor, DTensor.from_local):
            with pytest.raises(TypeError, match=r"dense.* nested"):
                refused(nested, mesh)
            with pytest.raises(TypeError, match=r"dense.* of torch\.sparse_coo"):
                refused(whole.to_sparse(), mesh)
        with pytest.raises(TypeError, match="takes a tensor, got list"):
            distribute_tensor([1.0], mesh)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="placement"):
            distribute_tensor(whole, mesh, ["dp", "tp"])  # type: ignore[list-item]
        with pytest.raises(RuntimeError, match="No device mesh"):
            distribute_tensor(whole)

    run_ranks(4, program)


def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    def leaf(rank: int) -> None:
        mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(4, requires_grad=True)
        distribute_tensor(whole if rank else whole * 2, mesh, [Shard(0)])

    def shapes(rank: int) -> None:
        distribute_tensor(torch.ones(4 + rank), init_device_mesh("cpu", (2,)), [Shard(0)])

    def layouts(rank: int) -> None:
        distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(rank)])

    def kinds(rank: int) -> None:
        mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(4)
        there = distribute_tensor(whole, mesh, [Shard(0)])
        distribute_tensor(there if rank else whole, mesh, [Shard(0)])

    assert "distribute leaf tensor" in raised_by_all(2, leaf, RuntimeError)
    assert "type=a plain tensor on rank 0" in raised_by_all(2, kinds, ValueError)
    wrong_shape = "shape=[4] on rank 0 does not match with shape=[5] on rank 1"
    assert wrong_shape in raised_by_all(2, shapes, ValueError)
    wrong_layout = "layout=[Shard(dim=0)] on DeviceMesh('cpu', [0, 1]) on rank 0 does not match"
    assert wrong_layout in raised_by_all(2, layouts, ValueError)


def test_strides_are_those_of_the_source_rank() -> None:
    images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sliced = torch.arange(120.0).view(2, 3, 4, 5).transpose(0, 3)[:, :2]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for whole, meta in itertools.product((images, sliced), (False, True)):
            for placements in ([Shard(1)], [Replicate()], [Partial()]):
                source = whole.to("meta") if meta else whole
                given = source if rank == 0 else torch.empty(whole.shape, device="meta")
                for made in (
                    distribute_tensor(given, mesh, placements),
                    distribute_tensor(source, mesh, placements, src_data_rank=None),
                ):
                    assert made.stride() == whole.clone().stride()
                    assert made.contiguous() is not made
                    if not meta:
                        assert torch.equal(made.full_tensor(), whole)
        layer: Any = nn.Conv2d(3, 4, 2)
        layer.to(memory_format=torch.channels_last)
        module: Any = distribute_module(copy.deepcopy(layer), mesh)
        assert module.weight.stride() == layer.weight.stride()
        assert module(images).stride() == layer(images).stride()

    run_ranks(2, program)


def test_the_result_shares_no_memory() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for source in (0, None):
            for placement in (Shard(0), Replicate()):
                whole = torch.ones(4)
                found = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
                whole.zero_()
                assert found.full_tensor().sum() == 4

    run_ranks(2, program)


def test_none_as_source_does_not_communicate() -> None:
    """One rank alone does it; it would wait for the other otherwise."""

    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        if rank:
            return distribute_tensor(torch.arange(4), mesh, [Shard(0)], src_data_rank=None)
        return None

    assert run_ranks(2, program)[1].to_local().tolist() == [2, 3]


def test_ranks_outside_the_mesh_get_no_elements() -> None:
    def program(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [1, 2])
        found = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
        return found.shape, found.to_local().tolist()

    assert run_ranks(3, program) == [((4,), []), ((4,), [0, 1]), ((4,), [2, 3])]


DEPENDS_ON_ELEMENTS: dict[str, Callable[[Any], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 1),
    "index": lambda x: range(x[1].long()),
    "a format": lambda x: f"{x[1]:.2f}",
    "equal": lambda x: torch.equal(x, x),
    "arange": lambda x: torch.arange(x.max()),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x.view(3, 2)[x.view(3, 2) > 3],
    "an index": lambda x: x[x[0].long()],
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "lengths": lambda x: x.tensor_split(x.long()[1:3]),
    "tolist": lambda x: x.tolist(),
}


def test_what_depends_on_elements_has_no_result_outside_the_mesh() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.arange(6.0), DeviceMesh("cpu", [0]), [Shard(0)])
        for call in DEPENDS_ON_ELEMENTS.values():
            if rank == 0:
                call(x)
                continue
            with pytest.raises(
                RuntimeError, match=r"depends on elements, and this rank is outside"
            ):
                call(x)
        for draw in (torch.poisson, lambda x: torch.multinomial(x, 6), torch._standard_gamma):
            assert draw(x + 1).shape == (6,)

    run_ranks(2, program)


def test_meta_tensors_stay_so() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for source in (0, None):
            for placement in (Shard(0), Replicate(), Partial()):
                whole = torch.empty(5, 3, device="meta", requires_grad=True)
                found = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
                assert found.is_meta
                assert found.requires_grad
                assert found.shape == (5, 3)
                real = torch.empty_like(found, device="cpu")
                assert isinstance(real, DTensor)
                assert real.device.type == "cpu"
                assert real.to_local().shape == found.to_local().shape

    run_ranks(2, program)


def test_the_current_mesh_is_the_default() -> None:
    def program(rank: int) -> None:
        with init_device_mesh("cpu", (2,)) as mesh:
            assert distribute_tensor(torch.ones(2)).placements == (Replicate(),)
            assert DTensor.from_local(torch.ones(2)).device_mesh is mesh

    run_ranks(2, program)


# -- redistribute ----------------------------------------------------------------------------


def test_redistribute_keeps_the_value() -> None:
    pairs: list[Sequence[Placement]] = [
        [Shard(0), Shard(0)], [Shard(1), Partial()], [Replicate(), Shard(0)], [Partial()] * 2
    ]  # fmt: skip

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(35.0).view(7, 5)
        for source in pairs:
            for target in pairs:
                for async_op in (False, True):
                    found = distribute_tensor(whole, mesh, source)
                    found = found.redistribute(placements=target, async_op=async_op)
                    assert found.placements == tuple(target)
                    assert torch.equal(found.full_tensor(), whole)

    run_ranks(4, program)


def test_redistribute_says_what_it_cannot_do() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        there = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="cannot go to"):
            there.redistribute(init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
        with pytest.raises(ValueError, match="needs placements"):
            there.redistribute()
        with pytest.raises(ValueError, match="must have the same length"):
            there.redistribute(placements=[Shard(0), Shard(0)])
        assert there.redistribute(placements=[Shard(-1)]).to_local() is there.to_local()

    run_ranks(2, program)


# -- distribute_module -----------------------------------------------------------------------


def rows(mod: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Shard(0)])


def local(mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> Tensor:
    assert isinstance(outputs, DTensor)
    return outputs.to_local()


def test_inputs_and_outputs_go_through_the_functions() -> None:
    torch.manual_seed(0)
    models = [Model(20, 1) for _ in range(4)]
    inputs = [torch.randn(5, 20) for _ in range(4)]
    with torch.no_grad():
        expected = [models[0](x) for x in inputs]

    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))
        found = distribute_module(models[rank], mesh, input_fn=rows, output_fn=local)
        out = found(inputs[rank])
        assert type(out) is Tensor
        assert torch.allclose(out, expected[rank], atol=1e-6)
        assert all(isinstance(parameter, DTensor) for parameter in found.parameters())

    run_ranks(4, program)


def test_gradients_of_replicated_parameters_are_replicated() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))

        def whole(mod: nn.Module, inputs: Any, mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()])

        model = distribute_module(Model(10, 10), mesh, input_fn=whole)
        model(torch.ones(10, 10, requires_grad=True)).sum().backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == (Replicate(),)

    run_ranks(4, program)


def test_functions_without_the_module_are_deprecated() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))
        model = Model(20, 1)
        with pytest.warns(FutureWarning, match="Deprecating") as told:
            distribute_module(
                model,
                mesh,
                input_fn=lambda inputs, mesh: rows(model, inputs, mesh),
                output_fn=lambda outputs, mesh: local(model, outputs, mesh),
            )
        assert all(one.filename == __file__ for one in told)
        assert type(model(torch.randn(5, 20))) is Tensor
        with pytest.raises(ValueError, match="input_fn takes three arguments"):
            distribute_module(model, mesh, input_fn=lambda: None)
        with pytest.raises(TypeError, match="output_fn must be a function of"):
            distribute_module(model, mesh, output_fn=torch.ones(1))  # type: ignore[arg-type]

    # Which warnings are caught is a process's affair.
    run_ranks(4, program, kind="processes")


def test_casts_reach_the_parts() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))
        for there in (
            DTensor.from_local(torch.rand(10), mesh, [Replicate()]),
            distribute_tensor(torch.rand(10), mesh, [Replicate()]),
        ):
            cast = there.to(torch.bfloat16)
            assert isinstance(cast, DTensor)
            assert cast.dtype == cast.to_local().dtype == torch.bfloat16
        model = Model(10, 10)
        distribute_module(model, mesh).to(torch.bfloat16)
        weight: Any = model.seq[0].weight
        assert weight.dtype == weight.to_local().dtype == torch.bfloat16
        x = distribute_tensor(torch.rand(10), mesh, [Replicate()])
        again = distribute_module(model, mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert again(x).dtype == torch.bfloat16

    run_ranks(4, program)


def test_a_meta_module_is_made_real_by_its_partition() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(4)))

        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in module._parameters.items():
                assert parameter is not None
                there = distribute_tensor(parameter, mesh, [Shard(0)])
                real = torch.empty_like(there, device=mesh.device_type)
                module.register_parameter(name, nn.Parameter(real))

        model = distribute_module(Model(20, 20, device="meta"), mesh, shard)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert not parameter.is_meta
            assert parameter.device.type == "cpu"
            assert parameter.to_local().shape[0] == 5

    run_ranks(4, program)


def test_what_is_left_is_replicated_and_ties_are_kept() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        assert distribute_module(model, mesh) is model
        tensors = [*model.parameters(), *model.buffers()]
        assert all(isinstance(tensor, DTensor) for tensor in tensors)
        assert model[2].weight is model[0].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert not model[0].bias.requires_grad
        assert len(list(model.parameters())) == 5

    run_ranks(2, program)


def test_recurrent_modules_run_with_what_replaced_their_parameters() -> None:
    torch.manual_seed(0)
    plain = [nn.LSTM(3, 4) for _ in range(2)]
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        expected = plain[0](x)[0]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = distribute_module(plain[rank], mesh)  # values are those of the first rank
        found = model(distribute_tensor(x, mesh))[0]
        assert torch.allclose(found.full_tensor(), expected, atol=1e-6)
        found.sum().backward()
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())

    run_ranks(2, program)


def test_full_tensor_on_one_rank_raises_in_time() -> None:
    """AReaL#187: what all ranks have to do, done by one, is an error and not a hang."""

    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(torch.arange(4.0), mesh, [Shard(0)])
        x.full_tensor()  # the group is made
        mesh.get_group().set_timeout(timedelta(seconds=1))
        if rank == 0:
            with pytest.raises(RuntimeError) as raised:
                x.full_tensor()
            return str(raised.value)
        return ""

    found = run_ranks(2, program, return_exceptions=True)
    assert "all_gather" in str(found[0]), found


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


EVERY_PLACEMENT: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def test_distributing_what_all_ranks_have_moves_nothing() -> None:
    """pytorch#143883: with ``src_data_rank=None`` nothing is sent, not even a word."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        with collectives() as called:
            for placements in itertools.product(EVERY_PLACEMENT, repeat=2):
                distribute_tensor(GRID, mesh, placements, src_data_rank=None)
        assert called == []

    run_ranks(4, program)
