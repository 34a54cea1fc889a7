"""States of objects: models in every parallelism, and optimizers, from any into any other."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.states import full
from tests.rounding import assert_close
from tests.wrapper import Wrapper
from tilework import checkpoint
from tilework.checkpoint import RandomState
from tilework.checkpoint.stateful_objects import places_of_parameters, unwrapped
from tilework.checkpoint.values import KIND
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard
from tilework.sharded import ChunkShardingSpec, ShardedOptimizer, shard_parameter
from tilework.testing import run_ranks


def net() -> Any:
    made = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return made


def rows(step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


def step(module: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    module(rows(number)).pow(2).mean().backward()
    optimizer.step()


def plain(rank: int, ranks: int) -> Any:
    module = net()
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def sharded(rank: int, ranks: int) -> Any:
    module = net()
    fully_shard(module[2])
    fully_shard(module)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def replicated(rank: int, ranks: int) -> Any:
    module = DistributedDataParallel(net())
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def split(rank: int, ranks: int) -> Any:
    module = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    return module, optimizer


KINDS = {"plain": plain, "fully_shard": sharded, "ddp": replicated, "zero": split}


def values(module: Any) -> list[Tensor]:
    return [full(value).clone() for value in unwrapped(module).state_dict().values()]


@pytest.mark.parametrize("before", KINDS)
def test_training_goes_on_in_any_parallelism(tmp_path: Path, before: str) -> None:
    def save(rank: int) -> list[Tensor]:
        module, optimizer = KINDS[before](rank, 2)
        for number in range(2):
            step(module, optimizer, number)
        checkpoint.save({"model": module, "optimizer": optimizer}, tmp_path)
        step(module, optimizer, 2)
        return values(module)

    expected = run_ranks(2, save)[0]
    for after, make in KINDS.items():
        for ranks in (2, 3):

            def load(rank: int, make: Any = make, ranks: int = ranks) -> list[Tensor]:
                module, optimizer = make(rank, ranks)
                into = {"model": module, "optimizer": optimizer}
                report = checkpoint.load(tmp_path, into=into)
                assert not report.missing
                step(module, optimizer, 2)
                return values(module)

            for found in run_ranks(ranks, load):
                for a, b in zip(found, expected, strict=True):
                    assert_close(a, b)
                    if after == before and ranks == 2:
                        assert a.equal(b)


def test_sharded_optimizers_into_plain_ones_and_back(tmp_path: Path) -> None:
    spec = [f"rank:{rank}/cpu" for rank in range(2)]

    def make(dim: int, groups: int) -> Any:
        module = net()
        shard_parameter(module[0], "weight", ChunkShardingSpec(dim, spec))
        named = dict(module.named_parameters())
        listed: Any = named
        if groups == 2:
            first = {"0.bias": named.pop("0.bias")}
            listed = [{"params": named}, {"params": first, "lr": 0.7}]
        return module, ShardedOptimizer(listed, torch.optim.Adam, lr=0.3)

    def fill(module: Any) -> None:
        for number, parameter in enumerate(module.parameters()):
            tiles = parameter.local_tiles() if hasattr(parameter, "local_tiles") else [parameter]
            for tile in tiles:
                tile.grad = torch.full_like(tile, number + 1.0)

    def program(rank: int) -> Any:
        module, optimizer = make(0, 1)
        fill(module)
        optimizer.step()
        checkpoint.save({"m": module, "o": optimizer}, tmp_path)
        again, other = make(1, 2)
        checkpoint.load(tmp_path, into={"m": again, "o": other})
        state = other.state_dict()["state"]
        moments = {name: full(each["exp_avg"]) for name, each in state.items()}
        return moments, [group["lr"] for group in other.param_groups], full(again[0].weight)

    moments, rates, weight = run_ranks(2, program)[0]
    assert rates == [0.3, 0.3]  # the settings that were saved with them
    found = checkpoint.read(tmp_path)
    assert weight.equal(found["m"]["0.weight"])
    for name, value in moments.items():
        assert value.equal(found["o"]["state"][name]["exp_avg"])
    single = net()
    optimizer = torch.optim.Adam(single.parameters())
    checkpoint.load(tmp_path, into={"m": single, "o": optimizer})
    assert optimizer.state[single[0].weight]["exp_avg"].equal(moments["0.weight"])


def test_tensor_and_data_parallel_into_others(tmp_path: Path) -> None:
    """Saved as dp x tp on 4 ranks; loaded on 1, 2, 3 and 8, with its optimizer."""

    def make(shape: tuple[int, ...], placements: list[Any]) -> Any:
        module = net()
        mesh = init_device_mesh("cpu", shape)
        for inner in module:
            for name, parameter in list(inner.named_parameters()):
                made = distribute_tensor(parameter.detach(), mesh, placements)
                setattr(inner, name, nn.Parameter(made))
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def fill(module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.detach().clone()

    def save(rank: int) -> None:
        module, optimizer = make((2, 2), [Replicate(), Shard(0)])
        fill(module)
        optimizer.step()
        checkpoint.save({"m": module, "o": optimizer}, tmp_path)

    run_ranks(4, save)
    found = checkpoint.read(tmp_path)
    for ranks in (1, 2, 3, 8):

        def load(rank: int, ranks: int = ranks) -> None:
            module, optimizer = make((ranks,), [Shard(0)])
            checkpoint.load(tmp_path, into={"m": module, "o": optimizer})
            for name, parameter in module.named_parameters():
                assert full(parameter.detach()).equal(found["m"][name])
                moment = optimizer.state[parameter]["exp_avg"]
                assert full(moment).equal(found["o"]["state"][name]["exp_avg"])
                assert moment.to_local().shape == parameter.to_local().shape

        run_ranks(ranks, load)


def test_random_generators(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(4)
    state: Any = {"random": RandomState(), "own": own}
    checkpoint.save(state, tmp_path)
    drawn: list[Any] = [torch.rand(3), random.random(), torch.rand(2, generator=own)]
    checkpoint.load(tmp_path, into=state)
    again: list[Any] = [torch.rand(3), random.random(), torch.rand(2, generator=own)]
    assert drawn[0].equal(again[0])
    assert drawn[1] == again[1]
    assert drawn[2].equal(again[2])


def test_generators_of_ranks(tmp_path: Path) -> None:
    def program(rank: int) -> bool:
        own = torch.Generator().manual_seed(rank)
        state = {"own": own, "same": RandomState()}
        checkpoint.save(state, tmp_path)
        first = torch.rand(2, generator=own)
        own.manual_seed(99)
        checkpoint.load(tmp_path, into=state)
        return torch.rand(2, generator=own).equal(first)

    assert run_ranks(2, program) == [True, True]


class Counts:
    """An object with a state of which a part differs between ranks."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts

    def state_dict(self) -> dict[str, int]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = {key: state[key] for key in ("epoch", "seen")}


def test_additional_ranks_keep_values_in_objects_and_containers(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        state = {"own": Counts(epoch=3, seen=rank), "dict": {"a": rank}, "list": [{"a": rank}, 1]}
        torch.manual_seed(rank)
        checkpoint.save({**state, "random": RandomState()}, tmp_path)

    def load(rank: int) -> Any:
        state: dict[str, Any] = {"own": Counts(epoch=0, seen=7), "dict": {}, "list": []}
        report = checkpoint.load(tmp_path, into={**state, "random": RandomState()})
        return state["own"].counts, state["dict"], state["list"], report.other_ranks

    run_ranks(2, save)
    loaded = run_ranks(3, load)
    assert loaded[1] == ({"epoch": 3, "seen": 1}, {"a": 1}, [{"a": 1}, 1], [])
    assert loaded[2] == (
        {"epoch": 3, "seen": 7},
        {},
        [],
        ["own.seen", "dict.a", "list.0.a", "random.rank"],
    )


def test_schedulers_and_averages(tmp_path: Path) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    average = torch.optim.swa_utils.AveragedModel(module)
    rates = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [2],
    )
    for number in range(3):
        step(module, optimizer, number)
        rates.step()
        average.update_parameters(module)
    state = {"m": module, "o": optimizer, "r": rates, "a": average}
    checkpoint.save(state, tmp_path)
    expected = rates.get_last_lr(), [p.clone() for p in average.parameters()]
    step(module, optimizer, 3)
    rates.step()
    average.update_parameters(module)
    checkpoint.load(tmp_path, into=state)
    assert rates.get_last_lr() == expected[0]
    assert all(map(torch.equal, average.parameters(), expected[1]))
    assert int(average.n_averaged) == 3


def test_places_of_parameters() -> None:
    module = net()
    for state in ({"a": module[0], "b": [module]}, {"b": [module], "a": module[0]}):
        places = places_of_parameters(state)
        assert places[id(module[0].weight)] == [(("b", 0), "0.weight"), (("a",), "weight")]
        assert places[id(module[2].bias)] == [(("b", 0), "2.bias")]


@pytest.mark.filterwarnings("ignore:.*torch.compile")
def test_compiled_modules_have_no_prefix(tmp_path: Path) -> None:
    module = net()
    checkpoint.save({"m": torch.compile(module)}, tmp_path)
    assert list(checkpoint.read(tmp_path)["m"]) == list(module.state_dict())


def test_a_loaded_module_stays_in_its_wrapper(tmp_path: Path) -> None:
    """Else data parallelism would be over, without a word."""

    def program(rank: int) -> bool:
        state = {"model": DistributedDataParallel(net())}
        checkpoint.save(state, tmp_path / "one")
        wrapper = state["model"]
        checkpoint.load(tmp_path / "one", into=state)
        return state["model"] is wrapper

    assert run_ranks(2, program) == [True, True]


LEVELS: list[Callable[[Any], Any]] = [
    lambda inner: [inner],
    lambda inner: (inner,),
    lambda inner: {"key": inner},
    lambda inner: {3: inner},
    lambda inner: {KIND: inner},
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("leaf", [2 + 3j, torch.ones(1)])
def test_what_is_saved_can_be_read_however_deep(
    level: Callable[[Any], Any], leaf: Any, tmp_path: Path
) -> None:
    def is_saved(depth: int) -> bool:
        try:
            checkpoint.save(reduce(lambda inner, _: level(inner), range(depth), leaf), tmp_path)
        except TypeError:
            return False
        return True

    saved, refused = 40, 300
    while refused - saved > 1:
        depth = (saved + refused) // 2
        saved, refused = (depth, refused) if is_saved(depth) else (saved, depth)
    checkpoint.read(tmp_path)
    assert 40 < saved < refused < 300


def test_a_container_that_holds_itself_is_refused(tmp_path: Path) -> None:
    around: list[Any] = []
    around.append({"inner": around})
    for use in (checkpoint.save, lambda state, path: checkpoint.load(path, state)):
        with pytest.raises(TypeError, match="Does a container hold itself"):
            use(around, tmp_path / "saved")
        checkpoint.save({"step": 1}, tmp_path / "saved")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2).to_sparse(), r"sparse \(torch.sparse_coo\).*to_dense"),
        (torch.ones(2, device="meta"), "on the device 'meta'"),
        (Wrapper(), "a Wrapper without memory"),
    ],
)
def test_tensors_without_dense_elements_are_refused(
    tensor: Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=f"the tensor 'a.0' is {message}"):
        checkpoint.save({"a": [tensor]}, tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*"))


def test_nested_and_quantized_tensors_are_refused(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="'x' is nested"):
        checkpoint.save({"x": jagged}, tmp_path)
