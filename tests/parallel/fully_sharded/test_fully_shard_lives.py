"""Programs that do something to a sharded module between its passes train as the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.errors import CollectiveMismatchError
from tilework.parallel import DataParallelMeshDims, fully_shard
from tilework.testing import run_ranks

ROWS: Any = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def shard(model: Any, root_only: bool = False) -> Any:
    for layer in () if root_only else model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Equal names, values and gradients of all parameters."""
    for (name, mine), (wanted_name, wanted) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == wanted_name
        assert isinstance(mine, DTensor)
        assert_close(full(mine), wanted.detach())
        assert (mine.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            assert_close(full(mine.grad), wanted.grad)


def loss_of(model: Any, x: Tensor) -> Any:
    return model(x).square().mean()


def train_both(model: Any, plain: Any, rank: int) -> None:
    """Two steps of both; decay shows parameters that have a gradient and should have none."""
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, plain)
    ]
    for _ in range(2):
        for each, x in ((model, ROWS[2 * rank : 2 * rank + 2]), (plain, ROWS)):
            each.zero_grad()
            loss_of(each, x).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(model, plain)


# -- acts: each is done to the sharded module with a rank's rows, and to the plain one with all ----


def assign_state(model: Any, x: Tensor) -> None:
    state = {name: value * 2 for name, value in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    optimizer.step()


def assign_full_state(model: Any, x: Tensor) -> None:
    model.load_state_dict({k: full(v) * 2 for k, v in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    optimizer.step()


def replace_layer(model: Any, x: Tensor) -> None:
    torch.manual_seed(5)
    model[1] = nn.Tanh()
    model[4] = nn.Linear(6, 3)
    model[2].weight = nn.Parameter(torch.eye(6))
    model[0].register_parameter("bias", None)
    loss_of(model, x).backward()


def parametrize_layer(model: Any, x: Tensor) -> None:
    nn.utils.parametrizations.weight_norm(model[2], "weight")
    loss_of(model, x).backward()


def swap_averages(model: Any, x: Tensor) -> None:
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.5)
    model(x)
    for mine, theirs in zip(model.parameters(), average.parameters(), strict=True):
        mine.data, theirs.data = theirs.data, mine.data
    with torch.no_grad():
        model(x)
    for parameter in model.parameters():
        parameter.data.mul_(2)  # autograd does not count it
    loss_of(model, x).backward()


def cast_there_and_back(model: Any, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        model.double().float()
        model[2].double().float()  # a layer alone


def optimizer_of_a_gathered_module(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    handle = model[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    optimizer.step()


def penalty(model: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).square().mean().backward()


def gradients_of_gradients(model: Any, x: Tensor) -> None:
    loss_of(model, x).backward(create_graph=True)
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    total: Any = sum(grad.square().sum() for grad in grads)
    total.backward()


def backward_twice(model: Any, x: Tensor) -> None:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def loss_on_features(model: Any, x: Tensor) -> None:
    features: list[Any] = []
    handle = model[0].register_forward_hook(lambda _, args, out: features.append(out))
    model(x)
    handle.remove()
    features[0].square().mean().backward()


def freeze_and_thaw(model: Any, x: Tensor) -> None:
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)
    model[0].requires_grad_(False)
    loss_of(model, x).backward()
    loss = loss_of(model, x)
    model[2].requires_grad_(False)
    loss.backward()
    model.requires_grad_(True)


def clear_between(model: Any, x: Tensor) -> None:
    for _ in range(2):
        loss = loss_of(model, x)
        model.zero_grad()
        loss.backward()


def evaluate_between(model: Any, x: Tensor) -> None:
    loss = loss_of(model, x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    loss.backward()


def act_in_place(model: Any, x: Tensor) -> None:
    model[1], model[3] = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    loss_of(model, x).backward()


class Recomputed(nn.Module):
    """A layer that a checkpoint within computes again."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.layer(x), x, use_reentrant=self.reentrant)
        return y


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("root_only", [True, False], ids=["root", "layers"])
@pytest.mark.parametrize(
    "act",
    [
        *(assign_state, assign_full_state, replace_layer, parametrize_layer, swap_averages),
        *(cast_there_and_back, optimizer_of_a_gathered_module, penalty, gradients_of_gradients),
        *(backward_twice, loss_on_features, freeze_and_thaw, clear_between, evaluate_between),
        act_in_place,
    ],
)
def test_acts(act: Callable[[Any, Tensor], None], root_only: bool) -> None:
    def program(rank: int) -> None:
        model, plain = shard(layers(), root_only), layers()
        act(model, ROWS[2 * rank : 2 * rank + 2])
        act(plain, ROWS)
        assert_same(model, plain)
        for each, x in ((model, ROWS[2 * rank : 2 * rank + 2]), (plain, ROWS)):
            each.zero_grad()
            loss_of(each, x).backward()  # nothing is left behind
        assert_same(model, plain)

    run_ranks(2, program)


@pytest.mark.parametrize("root_only", [True, False], ids=["root", "layers"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_a_module(reentrant: bool, root_only: bool) -> None:
    def program(rank: int) -> None:
        models = []
        for _ in range(2):
            model = layers()
            model[0], model[2] = Recomputed(model[0], reentrant), Recomputed(model[2], reentrant)
            models.append(model)
        shard(models[0], root_only)
        for each, x in ((models[0], ROWS[2 * rank : 2 * rank + 2]), (models[1], ROWS)):
            for _ in range(2):
                loss_of(each, x.clone().requires_grad_()).backward()
        assert_same(models[0], models[1])

    run_ranks(2, program)


def test_gradients_that_wait_are_reduced_when_they_are_asked_for() -> None:
    def program(rank: int) -> None:
        model, plain = shard(layers()), layers()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        model.set_requires_gradient_sync(False)
        x = ROWS[2 * rank : 2 * rank + 2]
        group = dist.get_default_group()

        def both(*acts: str) -> None:
            for act in acts:
                for optimizer, each, inputs in zip(
                    optimizers, (model, plain), (x, ROWS), strict=True
                ):
                    if act == "pass":
                        loss_of(each, inputs).backward()
                    else:
                        getattr(optimizer, act)()

        both("pass", "zero_grad", "pass")
        loss = loss_of(model, x)
        before = group.get_sequence_number_for_group()
        loss.backward()
        loss_of(plain, ROWS).backward()
        gathers = group.get_sequence_number_for_group() - before
        assert gathers == 1  # nothing is reduced
        both("step")
        assert_same(model, plain)
        both("zero_grad", "pass")
        model.set_requires_gradient_sync(True)
        both("pass")
        assert_same(model, plain)

    run_ranks(2, program)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="full parameters stay: values of forward")
def test_a_step_between_forward_and_backward_raises() -> None:
    """As in plain torch: backward would use the new weights."""

    def program(rank: int) -> None:
        for root_only in (True, False):
            model = shard(layers(), root_only)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = loss_of(model, ROWS)
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"weight was written to in place after"):
                loss.backward()

    run_ranks(2, program)


def test_activations_that_are_written_to_raise_as_ever() -> None:
    def program(rank: int) -> None:
        model, features = shard(layers()), []
        model[1].register_forward_hook(lambda _, args, out: features.append(out))
        y = model(ROWS)
        with torch.no_grad():
            features[0].add_(1)
        with pytest.raises(RuntimeError, match=r"\[4, 6\].* (written|inplace)|inplace.*\[4, 6\]"):
            y.sum().backward()

    run_ranks(1, program)


def test_parameters_beside_frozen_ones_and_unused_ones() -> None:
    """Frozen weights are there as long as backward needs them; unused ones have no gradient."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4).requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
            self.spare = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x).tanh() + self.up(self.down(x))
            return y

    def program(rank: int) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Linear(4, 1))
        model = shard(copy.deepcopy(plain))
        train_both(model, plain, rank)

    run_ranks(2, program)


def test_an_expert_that_one_rank_does_not_use() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, which: list[int]) -> Tensor:
            y: Tensor = torch.stack([self.experts[i](x) for i in which]).sum(0)
            return y

    def program(rank: int) -> None:
        torch.manual_seed(0)
        plain = Experts()
        model = fully_shard(copy.deepcopy(plain))
        model(ROWS[rank : rank + 1], [0, rank]).sum().backward()
        loss = sum(plain(ROWS[r : r + 1], [0, r]).sum() for r in range(2)) / 2
        loss.backward()
        assert_same(model, plain)

    run_ranks(2, program)


def test_recurrent_layers() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.cell(x[:, None])[0])
            return y

    def program(rank: int) -> None:
        torch.manual_seed(0)
        plain = Recurrent()
        model = shard(copy.deepcopy(plain))
        train_both(model, plain, rank)

    run_ranks(2, program)


# -- what raises ---------------------------------------------------------------------------------


def test_weights_that_two_units_share_are_refused() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0])
        with pytest.raises(
            ValueError, match=r"weight of Linear belongs to Linear, which was given"
        ):
            fully_shard(tied[1])
        later = shard(layers())
        later[2].bias = later[0].bias
        with pytest.raises(ValueError, match=r"bias of FSDPLinear|bias of Linear belongs to"):
            later(ROWS)

    run_ranks(2, program)


def test_tied_weights_stay_tied_when_they_get_memory() -> None:
    def program(rank: int) -> None:
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
            model[1].weight = model[0].weight
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"0.weight of Sequential is on the meta device"):
            model(torch.tensor([1]))
        model.to_empty(device="cpu")
        assert model[0].weight is model[1].weight
        nn.init.ones_(model[0].weight)
        model(torch.tensor([1, 2])).sum().backward()
        assert len(list(model.parameters())) == 1

    run_ranks(2, program)


def test_slices_of_a_sharded_container_are_plain_containers() -> None:
    def program(rank: int) -> None:
        model = shard(layers())
        assert type(model[:2]) is nn.Sequential
        assert_close(model[:2](ROWS), layers()[:2](ROWS))

    run_ranks(2, program)


def test_models_that_differ_raise_or_become_one() -> None:
    def program(rank: int) -> None:
        model = layers()
        with torch.no_grad():
            model[2].bias += rank
        with pytest.raises(
            CollectiveMismatchError, match=r"2.bias of Sequential is not the same on all ranks"
        ):
            fully_shard(model)
        assert not isinstance(model[0].weight, DTensor)
        fully_shard(model, src_data_rank=0)
        assert_same(model, layers())
        with pytest.raises(ValueError, match="one of the mesh's 2 ranks"):
            fully_shard(layers(), src_data_rank=2)

    run_ranks(2, program)


def test_optimizers_of_full_or_replaced_parameters_raise() -> None:
    def program(rank: int) -> None:
        model = layers()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model)
        with pytest.raises(RuntimeError, match=r"which fully_shard has replaced by DTensor"):
            early.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[2].weight = nn.Parameter(torch.eye(6))
        model(ROWS)
        with pytest.raises(RuntimeError, match=r"'weight' .* which an assignment has replaced"):
            optimizer.step()

    run_ranks(2, program)


def test_hooks_on_full_parameters_are_refused() -> None:
    """They would be lost: at once, and on a parameter that is assigned later."""

    def program(rank: int) -> None:
        model = layers()
        handle = model[2].weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(ValueError, match=r"2.weight of Sequential has hooks"):
            fully_shard(model)
        handle.remove()
        fully_shard(model)
        model[2].weight = nn.Parameter(torch.eye(6))
        model[2].weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(ValueError, match="after the next forward pass"):
            model(ROWS)

    run_ranks(2, program)


class Averaging(nn.Module):
    """A layer, and an average of its weights that ``forward`` writes before it uses it."""

    def __init__(self, write: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.average, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                self.write(mean, now)
        out: Tensor = self.layer(x) + self.average(x)
        return out.sum()


WRITES: list[Callable[[Any, Any], Any]] = [
    lambda mean, now: mean.lerp_(now, 0.5),
    lambda mean, now: mean.data.mul_(0.5).add_(now.data, alpha=0.5),
    lambda mean, now: setattr(mean, "data", mean.data * 0.5 + now.data * 0.5),
]


@pytest.mark.parametrize("write", WRITES)
def test_forward_writes_to_shards_before_they_are_gathered(write: Callable[..., Any]) -> None:
    def program(rank: int) -> None:
        plain = Averaging(write)
        model = copy.deepcopy(plain)
        fully_shard(model.average)
        fully_shard(model)
        for _ in range(3):
            assert_close(model(ROWS), plain(ROWS))
        late = fully_shard(Averaging(write))
        with pytest.raises(RuntimeError, match=r"wrote to average.* after these parameters were"):
            late(ROWS)

    run_ranks(2, program)


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(2), lambda p: setattr(p, "data", p * 2)])
def test_uncounted_writes_to_full_parameters_raise(write: Callable[..., Any]) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            write(self.weight)
            return super().forward(x)

    def program(rank: int) -> None:
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="wrote to a parameter in place"):
            fully_shard(Scaled(4, 4))(ROWS)
        still = fully_shard(nn.Linear(4, 4))
        nn.init.constant_(still.weight, torch.nan)
        assert still(ROWS).isnan().all()

    run_ranks(2, program)


def test_writes_within_forward_raise() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(Clipped(4, 4))
        with pytest.raises(RuntimeError, match="wrote to a parameter in place"):
            model(ROWS)
        with pytest.raises(NotImplementedError, match="max_norm"):
            fully_shard(nn.Embedding(4, 4, max_norm=1.0))
        functional: Any = torch.func.functional_call
        plain = fully_shard(layers())
        with pytest.raises(TypeError, match="functional_call on this module"):
            functional(plain, {"0.weight": torch.zeros(6, 4)}, ROWS)
        plain(ROWS)

    run_ranks(2, program)


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_ranks_that_part_all_raise(what: str) -> None:
    def program(rank: int) -> str:
        model = shard(layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in range(3):
                skips = rank == 1 and step == 1
                optimizer.zero_grad()
                loss = loss_of(model, ROWS) if not (skips and what == "forward") else None
                if loss is not None and not (skips and what == "backward"):
                    loss.backward()
                if not (skips and what == "step"):
                    optimizer.step()
            model(ROWS)
        except RuntimeError as error:
            return type(error).__name__
        return "no error"

    assert set(run_ranks(2, program)) <= {"CollectiveMismatchError", "PeerLostError"}


# -- settings ------------------------------------------------------------------------------------


def test_sums_and_divisors_of_gradients() -> None:
    def program(rank: int) -> list[float]:
        results = []
        for act in ("", "sum", "divide", "hook", "replicas"):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(4, 2, bias=False), mesh=mesh)
            if act == "sum":
                model.set_force_sum_reduction_for_comms(True)
            elif act == "divide":
                model.set_gradient_divide_factor(1.0)
            elif act == "hook":
                model.set_all_reduce_hook(lambda grad: grad.mul_(3))
            elif act == "replicas":
                model.set_requires_all_reduce(False)
                model(torch.ones(1, 4)).sum().backward()
                model.set_requires_all_reduce(True)
            model.set_is_last_backward(True)
            model.set_unshard_in_backward(False)
            model(torch.ones(1, 4)).sum().backward()
            results.append(full(model.weight.grad)[0, 0].item())
        with pytest.raises(ValueError, match="above zero, got 0"):
            model.set_gradient_divide_factor(0)
        with pytest.raises(NotImplementedError, match="register a backend"):
            model.set_custom_all_gather(None)
        return results

    assert run_ranks(2, program)[0] == [1, 1, 2, 3, 2]


def test_all_reduce_hooks_get_gradients_only() -> None:
    def program(rank: int) -> list[float]:
        model = fully_shard(nn.Linear(2, 2, bias=False))
        seen: list[float] = []
        model.set_all_reduce_hook(lambda grads: seen.extend(grads.tolist()))
        model(torch.full((1, 2), 3.0)).sum().backward()
        return seen

    assert run_ranks(2, program) == [[3.0, 3.0], [3.0, 3.0]]


def test_a_mesh_of_all_kinds_of_parallelism() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        plain = layers()[0]
        model = copy.deepcopy(plain)
        for name, placement in (("weight", Shard(0)), ("bias", Shard(0))):
            value = distribute_tensor(
                getattr(plain, name).detach(), mesh, [Replicate(), Replicate(), placement]
            )
            model._parameters[name] = nn.Parameter(value)
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
        with pytest.raises(RuntimeError, match="which fully_shard has replaced"):
            early.step()
        assert_close(full(model.weight), plain.weight.detach())
        x = DTensor.from_local(ROWS, mesh["tp"], [Replicate()])
        model(x).to_local().square().sum().backward()
        with pytest.raises(ValueError, match=r"names \['pp'\], and the mesh has the axes"):
            fully_shard(layers(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="pp"))

    run_ranks(4, program)


def test_nested_tied_and_ignored_parameters_on_such_a_mesh() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

        def tied() -> Any:
            model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
            for layer in model:
                value = distribute_tensor(torch.ones(2, 2), mesh, [Replicate(), Shard(0)])
                layer.weight = nn.Parameter(value)
            model[1].weight = model[0].weight
            return model

        def sharded(module: Any, **settings: Any) -> Any:
            dims = DataParallelMeshDims(shard="dp")
            return fully_shard(module, mesh=mesh, dp_mesh_dims=dims, **settings)

        model = tied()
        ignored = model[2].weight
        sharded([model[0], model[1]])
        sharded(model, ignored_params=[ignored])
        assert model[0].weight is model[1].weight
        assert model[2].weight is ignored
        other = tied()
        sharded(other[0])
        with pytest.raises(ValueError, match="Give modules that share a weight in a single call"):
            sharded(other)

    run_ranks(2, program)


def test_phases() -> None:
    """Each transition of a unit, and that it is idempotent."""

    def program(rank: int) -> None:
        model = shard(layers())
        unit = model[0]._fsdp_state
        assert unit.phase == "sharded"
        unit.start_gather()
        unit.start_gather()
        assert unit.phase == "gathering"
        gathered = unit.gather()
        assert unit.gather() is gathered
        assert unit.phase == "gathered"
        assert isinstance(model[0].weight, DTensor)  # not installed
        unit.unshard()
        assert not isinstance(model[0].weight, DTensor)
        assert isinstance(next(model[0].parameters()), DTensor)
        unit.reshard()
        unit.reshard()
        assert unit.phase == "sharded"
        unit.start_gather()
        unit.reshard()  # waits for the collective
        assert unit.phase == "sharded"

    run_ranks(2, program)


def test_a_backward_pass_that_raises_leaves_nothing_gathered() -> None:
    def program(rank: int) -> None:
        for root_only in (True, False):
            model, plain = shard(layers(), root_only), layers()
            handle = model[2].register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, ROWS).backward()
            handle.remove()
            assert model._fsdp_state.phase == "sharded"
            assert isinstance(model[4].weight, DTensor)  # full only while gathered
            model.zero_grad()
            loss_of(model, ROWS[2 * rank : 2 * rank + 2]).backward()
            loss_of(plain, ROWS).backward()
            assert_same(model, plain)

    run_ranks(2, program)


def test_a_cast_does_not_tie_what_was_untied() -> None:
    def program(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model[1].weight = model[0].weight
        model(torch.ones(1, 2))
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
        model.double()
        assert model[1].weight is not model[0].weight
        assert model[1].weight.full_tensor().abs().sum() > 0

    run_ranks(2, program)


def test_gradients_that_wait_outlive_a_freeze() -> None:
    def program(rank: int) -> float:
        model = fully_shard(nn.Linear(1, 1, bias=False))
        early = model(torch.ones(1, 1)).sum()
        model.set_requires_gradient_sync(False)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        model.set_requires_gradient_sync(True)
        model.requires_grad_(False)
        early.backward()
        grad: Any = model.weight.grad
        total: float = grad.full_tensor().item()
        return total

    assert run_ranks(2, program) == [1.5, 1.5]
