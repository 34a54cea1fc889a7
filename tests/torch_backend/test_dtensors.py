"""tilework's DTensors, meshes and groups beside torch.distributed's, in one program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_style
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.placement_types import _StridedShard

import tilework.checkpoint as tilework_checkpoint
import tilework.distributed as dist
import tilework.distributed.functional as functional
from tests.jobs import Launcher, Rank
from tests.rounding import assert_close
from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    local_map,
    manual_seed,
    module_from_torch,
    module_to_torch,
    plan_redistribution,
    show,
    to_sharded,
    verify,
    zeros,
)
from tilework.dtensor import init_device_mesh as init_tilework_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    PrepareModuleInput,
    RowwiseParallel,
    clip_grad_norm_,
    parallelize_module,
)
from tilework.parallel import fully_shard as tilework_fully_shard
from tilework.sharded import ChunkShardingSpec, shard_tensor

checkpoint: Any = torch.distributed.checkpoint
VALUES = torch.arange(14.0).view(7, 2)
LR = 0.1


# -- conversions -----------------------------------------------------------------------------


def convert(rank: Rank) -> None:
    with rank.joined():
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh = DeviceMesh.from_torch(theirs)
        assert DeviceMesh.from_torch(theirs) is mesh
        assert mesh.to_torch() is theirs
        assert mesh["b"].to_torch() == theirs["b"]
        assert DeviceMesh.from_torch(theirs["b"]) == mesh["b"]
        assert dist.get_rank() == torch_dist.get_rank()
        for placements, order, torch_placements in LAYOUTS:
            x = distribute_tensor(VALUES, mesh, placements, order=order)
            y = x.to_torch()
            assert y.placements == tuple(torch_placements)
            assert y.to_local().data_ptr() == x.to_local().data_ptr()
            assert y.full_tensor().tolist() == VALUES.tolist()
            back = DTensor.from_torch(y)
            assert back._spec == x._spec
            assert back.to_local().data_ptr() == x.to_local().data_ptr()
        other = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)] * 2)
        assert DTensor.from_torch(other).full_tensor().tolist() == VALUES.tolist()
        uneven = distribute_tensor(VALUES, mesh["a"], [Shard(0, (6, 1))])
        with pytest.raises(ValueError, match=r"torch\.chunk"):
            uneven.to_torch()


LAYOUTS: list[tuple[list[Any], Any, list[Any]]] = [
    ([Shard(0), Replicate()], None, [torch_tensor.Shard(0), torch_tensor.Replicate()]),
    ([Shard(1), Shard(0)], None, [torch_tensor.Shard(1), torch_tensor.Shard(0)]),
    ([Shard(0), Shard(0)], None, [torch_tensor.Shard(0), torch_tensor.Shard(0)]),
    ([Shard(0), Shard(0)], (1, 0), [_StridedShard(0, split_factor=2), torch_tensor.Shard(0)]),
    ([Partial(), Shard(1)], None, [torch_tensor.Partial(), torch_tensor.Shard(1)]),
    ([Partial("max"), Replicate()], None, [torch_tensor.Partial("max"), torch_tensor.Replicate()]),
]


def test_conversions_share_memory_and_mean_the_same(ranks: Launcher) -> None:
    ranks(4, convert)


def gradients(rank: Rank) -> None:
    with rank.joined():
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        weight = distribute_tensor(VALUES, mesh, [Shard(0)]).requires_grad_()
        full = weight.to_torch().full_tensor()
        (full * VALUES).sum().backward()
        assert weight.grad is not None
        assert weight.grad.full_tensor().tolist() == VALUES.tolist()

        theirs = torch_tensor.distribute_tensor(VALUES, mesh.to_torch(), [torch_tensor.Shard(0)])
        theirs.requires_grad_()
        x = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
        cast(Any, F.linear(x, theirs).square().sum()).backward()  # converted where they meet
        plain = VALUES.clone().requires_grad_()
        cast(Any, F.linear(torch.ones(3, 2), plain).square().sum()).backward()
        assert plain.grad is not None
        assert theirs.grad is not None
        assert isinstance(theirs.grad, torch_tensor.DTensor)
        assert theirs.grad.full_tensor().tolist() == plain.grad.tolist()


def test_gradients_pass_conversions(ranks: Launcher) -> None:
    ranks(2, gradients)


def writes(rank: Rank) -> None:
    with rank.joined():
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        x: Any = distribute_tensor(VALUES, mesh, [Shard(1)])
        view = x[1:]
        view.to_torch().add_(1)
        assert x[1:].full_tensor().tolist() == (VALUES + 1)[1:].tolist()
        x.to_torch().add_(1)
        assert view.full_tensor().tolist() == (VALUES + 2)[1:].tolist()
        model = nn.Module()
        model.register_buffer("view", view)
        cast(Any, module_to_torch(model)).view.zero_()
        assert x[1:].full_tensor().count_nonzero() == 0
        with torch.inference_mode():
            x.to_torch().add_(1)
        assert view.full_tensor().unique().tolist() == [1.0]
        with pytest.raises(RuntimeError, match="would not reach the base"):
            x.flatten().to_torch()


def test_writes_to_what_became_torchs_reach_all_that_has_the_memory(ranks: Launcher) -> None:
    ranks(2, writes)


def writes_in_the_graph(rank: Rank) -> None:
    with rank.joined():
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        x: Any = distribute_tensor(VALUES, mesh, [Shard(0)]).requires_grad_()
        for each in (x, x * 1):
            with pytest.raises(RuntimeError, match="modified inplace"):
                each.to_torch().mul_(2)
        doubled = x * 2
        square = doubled * doubled
        with torch.no_grad():
            doubled.to_torch().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(square.sum())
        cubes = (x.to_torch() ** 3).sum().full_tensor()
        (grad,) = torch.autograd.grad(cubes, x, create_graph=True)
        grad.sum().backward()
        assert x.grad is not None
        assert x.grad.full_tensor().tolist() == (6 * VALUES).tolist()


def test_writes_that_would_be_lost_to_the_graph_raise(ranks: Launcher) -> None:
    ranks(2, writes_in_the_graph)


def strides(rank: Rank) -> None:
    with rank.joined():
        theirs = init_device_mesh("cpu", (2,))
        mesh = DeviceMesh.from_torch(theirs)
        x: Any = distribute_tensor(VALUES, mesh, [Shard(0)])
        y = x.t().to_torch()
        z = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)]).t()
        back: Any = DTensor.from_torch(z)
        assert y.stride() == z.stride() == back.stride() == (1, 2)
        assert not y.is_contiguous()
        for each in (y, back):
            assert each.reshape(-1).full_tensor().tolist() == VALUES.t().flatten().tolist()
        images: Any = distribute_tensor(torch.ones(4, 2, 3, 3), mesh, [Shard(0)])
        last = images.to(memory_format=torch.channels_last).to_torch()
        assert last.stride() == (18, 1, 6, 2)
        assert last.contiguous().view(4, -1).shape == (4, 18)
        part = DTensor.from_torch(z[:, :3])
        assert part.stride() == (1, 2)  # none that leave gaps
        row: Any = distribute_tensor(VALUES[:1], mesh, [Replicate()])
        assert row.expand(3, 2).to_torch().stride() == (0, 1)


def test_strides_are_those_of_the_full_tensor(ranks: Launcher) -> None:
    ranks(2, strides)


def meshes(rank: Rank) -> None:
    with rank.joined():
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = DeviceMesh.from_torch(theirs)
        whole = distribute_tensor(VALUES, mesh.flatten("all"), [Shard(0)]).to_torch()
        assert whole.full_tensor().tolist() == VALUES.tolist()
        assert theirs._flatten("all") is whole.device_mesh
        turned = mesh["tp", "dp"]
        assert turned.to_torch() is mesh["tp", "dp"].to_torch()
        back = DTensor.from_torch(
            distribute_tensor(VALUES, turned, [Shard(0), Shard(1)]).to_torch()
        )
        assert back.device_mesh == turned
        assert back.full_tensor().tolist() == VALUES.tolist()
        theirs["dp"]._flatten("rows")
        assert mesh["rows"].mesh.tolist() == mesh["dp"].mesh.tolist()
        assert mesh.flatten("rows").to_torch().mesh.tolist() == [0, 1, 2, 3]  # as torch has that
        with pytest.raises(KeyError, match="dp"):
            mesh["tp"]["dp"]
        ours = init_tilework_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert ours["b"].to_torch() is ours["b"].to_torch()


def test_parts_of_meshes_become_torchs(ranks: Launcher) -> None:
    ranks(4, meshes)


def descend(rank: Rank) -> None:
    with rank.joined():
        theirs = TorchMesh("cpu", [1, 0])
        x = distribute_tensor(VALUES, DeviceMesh.from_torch(theirs), [Shard(0)])
        y: Any = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)])
        for convert in (x.to_torch, lambda: DTensor.from_torch(y), lambda: x + y):
            with pytest.raises(ValueError, match="ranks do not ascend along axis 0"):
                convert()
        assert x.full_tensor().tolist() == VALUES.tolist()


def test_meshes_on_which_torchs_values_change_are_refused(ranks: Launcher) -> None:
    ranks(2, descend)


def take_async(rank: Rank, folder: Path) -> None:
    with rank.joined():
        theirs = init_device_mesh("cpu", (2,))
        mesh, world = DeviceMesh.from_torch(theirs), cast(Any, torch_dist.group.WORLD)
        tilework_checkpoint.save({"sum": summed(VALUES)}, folder, group=world)
        for tensor in (
            distribute_tensor(summed(VALUES), mesh, [Shard(0)]),
            DTensor.from_local(summed(VALUES), mesh, [Replicate()]),
            shard_tensor(summed(VALUES), ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])),
        ):
            assert tensor.full_tensor().tolist() == (2 * VALUES).tolist()
        zeros = summed(VALUES * 0)
        tilework_checkpoint.load(folder, {"sum": zeros}, group=world)
        assert (zeros + 0).tolist() == (2 * VALUES).tolist()
        weight: Any = nn.Parameter(torch_tensor.distribute_tensor(VALUES, theirs, [T.Shard(0)]))
        full = weight.redistribute(theirs, [T.Replicate()], async_op=True)
        part = full.to_local()
        for whole in (DTensor.from_torch(full), DTensor.from_local(part, mesh, [Replicate()])):
            assert type(whole.to_local()) is Tensor
            (grad,) = torch.autograd.grad(whole.sum(), weight)
            assert cast(Any, grad).full_tensor().tolist() == [[1.0, 1.0]] * 7


def summed(values: Tensor) -> Tensor:
    """The sum over the ranks, still in flight."""
    world: Any = torch_dist.group.WORLD
    return functional_collectives.all_reduce(values, "sum", world)  # type: ignore[no-any-return]


def test_results_of_functional_collectives_are_taken(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2, take_async, tmp_path / "saved")


def mix(rank: Rank) -> None:
    """torch's values in tilework's functions work; objects do, or are refused by name."""
    with rank.joined():
        theirs = init_device_mesh("cpu", (2,))
        mesh = DeviceMesh.from_torch(theirs)
        x = distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)])  # type: ignore[arg-type,list-item]
        assert x.placements == (Shard(0),)
        assert x.device_mesh is mesh
        assert x.redistribute(placements=[torch_tensor.Replicate()]).placements == (Replicate(),)  # type: ignore[list-item]
        part = DTensor.from_local(torch.ones(2), theirs, [torch_tensor.Shard(0)])  # type: ignore[arg-type,list-item]
        assert part.shape == (4,)
        made = zeros(4, device_mesh=theirs, placements=[torch_tensor.Partial()])  # type: ignore[arg-type,list-item]
        assert made.placements == (Partial(),)
        assert x.redistribute(theirs, [torch_tensor.Replicate()]).placements == (Replicate(),)  # type: ignore[arg-type,list-item]
        doubled = local_map(
            lambda a: a * 2,
            out_placements=cast(Any, [torch_tensor.Shard(0)]),
            in_placements=cast(Any, ([torch_tensor.Shard(0)],)),
            device_mesh=cast(Any, theirs),
        )
        assert doubled(x).full_tensor().tolist() == (VALUES * 2).tolist()
        replicated: Any = torch_tensor.Replicate()
        manual_seed(3, cast(Any, theirs))
        whole = ColwiseParallel(input_layouts=replicated, output_layouts=replicated)
        layer = parallelize_module(nn.Linear(2, 4), cast(Any, theirs), whole)
        assert layer(VALUES).shape == (7, 4)
        kept = PrepareModuleInput(input_layouts=replicated, desired_input_layouts=[replicated])
        assert kept.input_layouts == kept.desired_input_layouts == (Replicate(),)
        sharded: Any = tilework_fully_shard(nn.Linear(2, 2), mesh=cast(Any, theirs))
        assert sharded(VALUES).shape == (7, 2)
        replicas = DistributedDataParallel(
            nn.Linear(2, 2), process_group=cast(Any, torch_dist.group.WORLD)
        )
        assert replicas(VALUES).shape == (7, 2)
        ones = torch.ones(3)
        dist.all_reduce(ones, group=cast(Any, torch_dist.group.WORLD))
        assert ones.tolist() == [2, 2, 2]
        world = cast(Any, torch_dist.group.WORLD)
        assert functional.all_reduce(ones, "sum", world).tolist() == [4, 4, 4]
        assert functional.all_reduce(ones, "sum", cast(Any, theirs)).tolist() == [4, 4, 4]
        y: Any = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(1)])
        for sum_ in (x + y, y + x, torch.stack([x, y]).sum(0), x.clone().add_(y)):
            assert isinstance(sum_, DTensor)
            assert sum_.full_tensor().tolist() == (VALUES * 2).tolist()
        for refused, words in REFUSED.items():
            with pytest.raises((TypeError, RuntimeError)) as error:
                refused(x, y, mesh)
            for word in words:
                assert word in str(error.value), error.value
        assert x.full_tensor().tolist() == y.full_tensor().tolist() == VALUES.tolist()


def torchs_module(mesh: DeviceMesh) -> nn.Module:
    return T.distribute_module(nn.Linear(2, 2), cast(Any, mesh.to_torch()))


def sharded_linear(weight: DTensor) -> nn.Module:
    layer = nn.Linear(2, 7, bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def embedded(mesh: Any) -> Any:
    rows = torch_tensor.distribute_tensor(torch.ones(6, 2), mesh, [T.Shard(0)])
    numbers = torch_tensor.distribute_tensor(torch.tensor([1, 4]), mesh, [T.Replicate()])
    return F.embedding(numbers, rows)


T = torch_tensor
OURS: Any = Shard(0)
COLWISE: Any = torch_style.ColwiseParallel()
#: What one library says to the other's objects.
REFUSED: dict[Callable[[Any, Any, Any], Any], list[str]] = {
    (lambda x, y, m: distribute_tensor(y, m, [Shard(0)])): ["torch.distributed", "from_torch"],
    (lambda x, y, m: DTensor.from_local(y, m, [Shard(0)])): ["torch.distributed", "from_torch"],
    (lambda x, y, m: local_map(lambda a: a, out_placements=[Shard(0)])(y)): [
        "local_map",
        "from_torch",
    ],
    (lambda x, y, m: show(y)): ["show", "from_torch"],
    (lambda x, y, m: plan_redistribution(y, [Replicate()])): ["plan_redist", "from_torch"],
    (lambda x, y, m: to_sharded(y)): ["to_sharded", "from_torch"],
    (lambda x, y, m: setattr(x, "data", y)): ["data", "from_torch"],
    (lambda x, y, m: setattr(x.clone().requires_grad_(), "grad", y)): ["gradient", "from_torch"],
    (lambda x, y, m: (x.clone().requires_grad_() * 2).backward(y)): ["backward", "from_torch"],
    (lambda x, y, m: torch.autograd.grad([z := x.clone().requires_grad_()], z, grad_outputs=y)): [
        "backward",
        "from_torch",
    ],
    (lambda x, y, m: tilework_fully_shard(torchs_module(m), mesh=m)): ["weight", "from_torch"],
    (lambda x, y, m: functional.all_reduce(y)): ["torch.distributed", "to_local"],
    (lambda x, y, m: functional.all_reduce(x)): ["DTensor", "to_local"],
    (lambda x, y, m: functional.all_reduce(VALUES, cast(Any, torch_dist.ReduceOp.MAX))): [
        "ReduceOp.MAX",
        "from_torch",
    ],
    (
        lambda x, y, m: parallelize_module(
            nn.Linear(2, 4), m, ColwiseParallel(input_layouts=Replicate())
        )(y)
    ): ["the input of Linear", "from_torch"],
    (lambda x, y, m: verify({"weight": y})): ["weight", "torch.distributed", "from_torch"],
    (lambda x, y, m: nn.utils.get_total_norm([x, y])): [
        "_NormPartial",
        "torch.distrib",
        "to_torch",
    ],
    (lambda x, y, m: nn.utils.get_total_norm([y, x])): [
        "_NormPartial",
        "torch.distrib",
        "to_torch",
    ],
    (lambda x, y, m: DTensor.from_torch(VALUES)): ["from_torch", "Tensor"],
    (lambda x, y, m: DeviceMesh.from_torch(VALUES)): ["from_torch"],
    (lambda x, y, m: distribute_tensor(VALUES, m, [cast(Any, _StridedShard(0, split_factor=2))])): [
        "order="
    ],
    (lambda x, y, m: distribute_tensor(VALUES, "cpu", [Shard(0)])): ["DeviceMesh", "str"],  # type: ignore[arg-type]
    (lambda x, y, m: dist.all_reduce(torch.ones(2), cast(Any, torch_dist.ReduceOp.MAX))): [
        "ReduceOp.MAX"
    ],
    (lambda x, y, m: torch_dist.all_reduce(torch.ones(2), cast(Any, dist.ReduceOp.MAX))): [
        "tilework",
        "torch.distributed.ReduceOp.MAX",
    ],
    (lambda x, y, m: torch_dist.all_reduce(torch.ones(2), group=m.get_group())): [
        "tilework",
        "new_group",
    ],
    (lambda x, y, m: dist.all_reduce(x)): ["DTensor", "to_local"],
    (lambda x, y, m: dist.all_reduce(y)): ["DTensor", "to_local"],
    (lambda x, y, m: T.distribute_tensor(x, m.to_torch(), [T.Shard(0)])): ["tilework", "to_torch"],
    (lambda x, y, m: T.DTensor.from_local(VALUES, m, [T.Shard(0)])): ["tilework", "to_torch"],
    (lambda x, y, m: T.zeros(4, device_mesh=m)): ["tilework", "to_torch"],
    (lambda x, y, m: torch_dist.all_reduce(x)): ["tilework", "to_torch"],
    (lambda x, y, m: torch_dist.broadcast(x, 0)): ["tilework", "to_torch"],
    (lambda x, y, m: T.distribute_tensor(VALUES, m, [T.Shard(0)])): ["tilework", "to_torch"],
    (lambda x, y, m: T.distribute_tensor(VALUES, m.to_torch(), [OURS])): [
        "tilework",
        "to_torch",
    ],
    # torch makes it as it is told, and asks at the first use.
    (lambda x, y, m: T.zeros(4, device_mesh=m.to_torch(), placements=[OURS]).full_tensor()): [
        "tilework",
        "to_torch",
    ],
    (lambda x, y, m: T.DTensor.from_local(x, m.to_torch(), [T.Shard(0)])): ["tilework", "to_torch"],
    (lambda x, y, m: y.redistribute(m, [T.Replicate()])): ["tilework", "to_torch"],
    (lambda x, y, m: y.redistribute(m.to_torch(), [Replicate()])): ["tilework", "to_torch"],
    (lambda x, y, m: T.distribute_module(nn.Linear(2, 2), m)): ["tilework", "to_torch"],
    (lambda x, y, m: fully_shard(nn.Linear(2, 2), mesh=m)): ["tilework", "to_torch"],
    (lambda x, y, m: fully_shard(sharded_linear(x), mesh=m.to_torch())): [
        "fully_shard",
        "module_to_torch",
    ],
    (lambda x, y, m: torch_dist.new_group(m.get_group())): ["tilework", "new_group"],
    (lambda x, y, m: TorchMesh("cpu", m)): ["tilework", "to_torch"],
    (lambda x, y, m: nn.parallel.DistributedDataParallel(nn.Linear(2, 2), device_mesh=m)): [
        "tilework",
        "to_torch",
    ],
    (lambda x, y, m: DistributedDataParallel(torchs_module(m))): ["weight", "module_from_torch"],
    (
        lambda x, y, m: module_from_torch(
            cast(Any, fully_shard)(nn.Linear(2, 2), mesh=m.to_torch())
        )
    ): [
        "fully_shard",
        "before",
    ],
    (lambda x, y, m: DTensor.from_torch(embedded(m.to_torch()))): ["_MaskPartial", "redistribute"],
    (lambda x, y, m: torch_dist.barrier(group=m.get_group())): ["tilework", "new_group"],
    (lambda x, y, m: torch_dist.get_rank(m.get_group())): ["tilework", "new_group"],
    (lambda x, y, m: parallelize_module(nn.Linear(2, 2), m, COLWISE)): [
        "tilework.parallel",
        "to_torch",
    ],
    (lambda x, y, m: shard_tensor(y, ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))): [
        "torch.distributed.tensor",
        "from_torch",
    ],
}


def test_each_library_names_the_others_objects(ranks: Launcher) -> None:
    ranks(2, mix)


def clip(rank: Rank) -> None:
    with rank.joined():
        theirs = init_device_mesh("cpu", (2,))
        for values in (
            VALUES,
            distribute_tensor(VALUES, DeviceMesh.from_torch(theirs), [Shard(0)]),
        ):
            both = [
                nn.Parameter(torch_tensor.distribute_tensor(VALUES, theirs, [T.Shard(0)])),
                nn.Parameter(values.clone()),
            ]
            for each in both:
                each.grad = each.detach().clone()
            norm = clip_grad_norm_(both, 1.0)
            assert_close(norm, torch.stack([VALUES, VALUES]).norm())
            for each in both:
                assert_close(_full(each.grad), VALUES / norm)


def test_gradients_of_both_libraries_are_clipped_together(ranks: Launcher) -> None:
    ranks(2, clip)


def step_together(rank: Rank) -> None:
    """Optimizers and ``out=`` where the libraries meet."""
    with rank.joined():
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        theirs = torch_tensor.distribute_tensor(VALUES, mesh.to_torch(), [torch_tensor.Shard(0)])
        for foreach in (True, False, None):
            params = [nn.Parameter(each) for each in (theirs.clone(), spread(mesh))]
            for each in params:
                each.grad = each.detach().clone()
            torch.optim.SGD(params, lr=0.5, foreach=foreach).step()
            for each in params:
                assert _full(each.detach()).tolist() == (VALUES / 2).tolist()
        x = spread(mesh)
        assert torch.add(theirs, 1, out=x) is x
        assert x.full_tensor().tolist() == (VALUES + 1).tolist()
        with pytest.raises(TypeError, match=r"add with out= got a DTensor of torch"):
            torch.add(x, 1, out=theirs)
        with pytest.raises(TypeError, match=r"set_\(\) got a DTensor of torch"):
            x.set_(theirs)


def spread(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(VALUES, mesh, [Shard(0)])


def test_optimizers_and_outputs_where_both_meet(ranks: Launcher) -> None:
    ranks(2, step_together)


def keep(rank: Rank, folder: Path) -> None:
    """tilework's checkpoints save and fill torch's DTensors, in their own memory."""
    with rank.joined():
        theirs = init_device_mesh("cpu", (2,))
        group = cast(Any, torch_dist.group.WORLD)
        x = distribute_tensor(VALUES, DeviceMesh.from_torch(theirs), [Shard(0)])
        with pytest.raises(TypeError, match=r"tilework.checkpoint.save and async_save take it"):
            checkpoint.async_save({"x": x}, checkpoint_id=folder / "ours by torch")
        y = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)])
        tilework_checkpoint.save({"y": y}, folder, group=group)
        z = torch_tensor.zeros(7, 2, device_mesh=theirs, placements=[torch_tensor.Shard(1)])
        tilework_checkpoint.load(folder, {"y": z}, group=group)
        assert z.full_tensor().tolist() == VALUES.tolist()


def test_tileworks_checkpoints_take_torchs_dtensors(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2, keep, tmp_path / "saved")


def on_gloo(rank: Rank) -> None:
    with rank.joined("gloo"):
        theirs = init_device_mesh("cpu", (2,))
        with pytest.raises(TypeError, match="init_process_group"):
            DeviceMesh.from_torch(theirs)
        with pytest.raises(TypeError, match="init_process_group"):
            dist.all_reduce(torch.ones(2), group=cast(Any, torch_dist.group.WORLD))
        x = distribute_tensor(VALUES, init_tilework_mesh("cpu", (1,)), [Shard(0)])
        y: Any = torch_tensor.distribute_tensor(VALUES, theirs, [torch_tensor.Shard(0)])
        # Of a TypeError Python would make "unsupported operand", False, or another tensor.
        for operator in (
            *(lambda: torch.add(x, y), lambda: y.add(x), lambda: x.eq(y)),
            *(lambda: x + y, lambda: y + x, lambda: x == y, lambda: y == x, lambda: x != y),
            *(lambda: x @ y, lambda: y // x, lambda: x in [y], lambda: iadd(x, y)),
        ):
            with pytest.raises(RuntimeError, match="init_process_group"):
                operator()
        with pytest.raises(RuntimeError, match="from_torch"):
            iadd(y, x)


def iadd(x: Any, y: Any) -> None:
    x += y


def test_groups_of_other_backends_are_refused(ranks: Launcher) -> None:
    ranks(2, on_gloo)


# -- torch's FSDP and checkpoints, of a model that tilework made tensor parallel -----------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def batch(step: int, rows: slice = slice(None)) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rows]


def losses_of(model: nn.Module, rows: slice, steps: int = 4, first: int = 0) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    found = []
    for step in range(first, first + steps):
        loss = (model(batch(step, rows)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def two_dimensional(lengths: tuple[int, int]) -> tuple[nn.Module, Any]:
    """The model on a mesh of torch's: tensor parallel by tilework, sharded by torch."""
    theirs = init_device_mesh("cpu", lengths, mesh_dim_names=("dp", "tp"))
    model = Net()
    tp = DeviceMesh.from_torch(theirs["tp"])
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    module_to_torch(model)
    fully_shard(model, mesh=theirs["dp"])
    return model, theirs


def train(rank: Rank, folder: Path) -> list[float]:
    with rank.joined():
        model, theirs = two_dimensional((2, 2))
        assert cast(Any, model).up.weight.placements == (
            _StridedShard(0, split_factor=2),
            torch_tensor.Shard(0),
        )
        row = theirs.get_coordinate()[0]
        found = losses_of(model, slice(row, None, 2))
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
        total = torch.tensor(found)
        torch_dist.all_reduce(total, group=theirs["dp"].get_group())
        return (total / 2).tolist()


def resume(rank: Rank, folder: Path) -> dict[str, Any]:
    """On another mesh: what was saved, as plain tensors."""
    with rank.joined():
        model, _ = two_dimensional((1, 2))
        state = {"model": model.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        values = {name: _full(tensor).tolist() for name, tensor in model.state_dict().items()}
        tensor_parallel = Net()
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(tensor_parallel, mesh, plan)
        state = {"model": module_to_torch(tensor_parallel).state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        module_from_torch(tensor_parallel)
        assert isinstance(tensor_parallel.up.weight, DTensor)
        for name, tensor in tensor_parallel.state_dict().items():
            assert _full(tensor).tolist() == values[name]
        return values


def state_dicts(rank: Rank) -> Any:
    """torch's functions of state dicts on a model of tilework's."""
    functions: Any = torch_state_dict
    with rank.joined():
        model, other = Net(), Net()
        mesh = DeviceMesh.from_torch(init_device_mesh("cpu", (2,)))
        for each in (model, other):
            parallelize_module(each, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        rank_0 = functions.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = functions.get_model_state_dict(model, options=rank_0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        options = functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        functions.set_model_state_dict(other, state, options=options)
        return _lists(other.state_dict()), _lists(state)


def _lists(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _full(tensor).tolist() for name, tensor in state.items()}


def test_torchs_state_dicts_of_tileworks_models_are_whole(ranks: Launcher) -> None:
    plain = _lists(Net().state_dict())
    assert ranks(2, state_dicts) == [(plain, plain), (plain, {})]


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def test_torchs_fsdp_and_checkpoints_serve_a_tensor_parallel_model(
    ranks: Launcher, tmp_path: Path
) -> None:
    plain = Net()
    expected = losses_of(plain, slice(None))
    for found in ranks(4, train, tmp_path / "saved"):
        assert_close(torch.tensor(found), torch.tensor(expected))
    for values in ranks(2, resume, tmp_path / "saved"):
        for name, parameter in plain.state_dict().items():
            assert_close(torch.tensor(values[name]), parameter)
