"""Whatever a step does to the state comes back when a rank is lost, or is refused before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tilework.parallel import Resilient, ZeroRedundancyOptimizer
from tilework.parallel.resilient.snapshots import pack, unpack
from tilework.testing import run_ranks

State = dict[str, Any]
STEPS = 6


class Net(nn.Module):
    """A parameter, a buffer and a number in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Counting(torch.optim.Optimizer):
    """An optimizer that keeps tensors, numbers and lists for parameters, and one for itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["step"] = kept.get("step", 0) + 1
                kept["sum"] = kept.get("sum", torch.zeros(2)) + 1
                kept["steps"] = [*kept.get("steps", []), kept["step"]]
        own: Any = self.state
        own["calls"] = own.get("calls", 0) + 1


class Holder:
    """An object with any state."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> State:
        return {"value": self.value}

    def load_state_dict(self, state: State) -> None:
        self.value = state["value"]


def build() -> State:
    net = Net()
    return {
        "tensor": torch.zeros(1),
        "net": net,
        "optimizer": Counting(net.parameters()),
        "random": Holder(),  # a name that the loop must leave to the program
    }


def build_zero() -> State:
    net = nn.ModuleList([Net() for _ in range(5)])
    return {"net": net, "zero": ZeroRedundancyOptimizer(net.parameters(), Counting, lr=0.1)}


def replace_tensor(state: State) -> float:
    state["tensor"] = state["tensor"] + 1
    return float(state["tensor"])


def replace_buffer(state: State) -> float:
    state["net"].mean = state["net"].mean + 1
    return float(state["net"].mean.sum())


def replace_parameter(state: State) -> float:
    state["net"].weight = nn.Parameter(state["net"].weight.detach() + 1)
    return float(state["net"].weight.detach().sum())


def count_calls(state: State) -> int:
    state["net"].calls += 1
    return int(state["net"].calls)


def step_optimizer(state: State) -> object:
    state["optimizer"].step()
    kept = state["optimizer"].state
    values = dict(kept[state["net"].weight])
    return values["step"], values["sum"].tolist(), values["steps"], kept["calls"]


def hold_numpy(state: State) -> float:
    state["random"].value = np.float64(state["random"].value) + 1
    return float(state["random"].value)


def step_zero(state: State) -> list[int]:
    """The number of values that all ranks together have for the parameters."""
    inner = state["zero"].optim
    if inner is not None:
        inner.step()
    kept = [] if inner is None else [v for p, v in inner.state.items() if isinstance(p, Tensor)]
    counts = torch.tensor([len(kept), sum(v["step"] + int(v["sum"][0]) for v in kept)])
    dist.all_reduce(counts)
    return counts.tolist()


def trained(
    make: Callable[[], State], act: Callable[[State], object], victim: int | None
) -> list[Any]:
    """The values of each step on each of three ranks, of which one is lost in the fourth."""

    def program(rank: int) -> list[object]:
        def step(state: State, number: int) -> object:
            if rank == victim and number == 3:
                raise SystemExit
            dist.barrier()
            return act(state)

        return [value for _, value in Resilient(make, step).run(STEPS)]

    return run_ranks(3, program, return_exceptions=True)


ACTS = [
    (build, replace_tensor),
    (build, replace_buffer),
    (build, replace_parameter),
    (build, count_calls),
    (build, step_optimizer),
    (build, hold_numpy),
    (build_zero, step_zero),
]


@pytest.mark.parametrize(("make", "act"), ACTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_step_has_changed_comes_back_on_every_rank(
    make: Callable[[], State], act: Callable[[State], object], victim: int
) -> None:
    expected = trained(make, act, None)
    results = trained(make, act, victim)
    for rank in {0, 1, 2} - {victim}:
        assert results[rank] == expected[rank]


def test_numpy_s_generator_comes_back() -> None:
    """In one process with all ranks it is one for all: a rank alone."""

    def draw(state: State, number: int) -> tuple[float, float]:
        return float(np.random.rand()), random.random()

    loop = Resilient(dict, draw)

    def program(rank: int) -> bool:
        values = dict(loop.run(2))
        loop._enter("lost")  # from the copy after the second step
        then = np.random.rand(), random.random()
        loop._enter("lost")
        assert loop.steps == len(values) == 2
        return then == (np.random.rand(), random.random())

    assert run_ranks(1, program) == [True]


def grow(state: State) -> None:
    state["tensor"] = torch.cat([state["tensor"], torch.ones(1)])


def resize(state: State) -> None:
    state["tensor"].resize_(7).fill_(1)


def widen(state: State) -> None:
    state["tensor"] = state["tensor"].double()


def add_tensor(state: State) -> None:
    state["more"] = torch.zeros(3)


def add_buffer(state: State) -> None:
    state["net"].register_buffer("more", torch.zeros(3))


def remove_buffer(state: State) -> None:
    del state["net"].mean


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (grow, r"tensor was float32 \[1\] when .* is float32 \[2\] after"),
        (resize, r"is float32 \[7\]"),
        (widen, r"is float64 \[1\]"),
        (add_tensor, r"more was missing when"),
        (add_buffer, r"net/more was missing"),
        (remove_buffer, r"net/mean was float32 \[2\] .* is missing"),
    ],
)
def test_what_build_could_not_make_is_refused_when_it_appears(
    act: Callable[[State], None], words: str
) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            list(Resilient(build, lambda state, number: act(state)).run(1))

    run_ranks(2, program)


def test_a_state_that_build_makes_differently_later_is_refused() -> None:
    def make() -> State:
        return (
            {"tensor": torch.zeros(1), "more": torch.zeros(3)}
            if dist.get_world_size() == 3
            else {"tensor": torch.zeros(1)}
        )

    def program(rank: int) -> None:
        def step(state: State, number: int) -> None:
            if rank == 1 and number == 1:
                raise SystemExit
            dist.barrier()

        with pytest.raises(ValueError, match=r"more is float32 \[3\].*lacks it"):
            list(Resilient(make, step).run(3))

    results = run_ranks(3, program, return_exceptions=True)
    assert [results[0], results[2]] == [None, None]


def test_plain_data_that_others_could_not_read_are_refused_at_once() -> None:
    plain = {"a": {"value": 1}, "b": {"value": np.float64(1)}}
    assert unpack(pack(plain, trusted=True), trusted=True) == plain
    with pytest.raises(TypeError, match=r"state\['b'\] has a value that another rank could not"):
        pack(plain, trusted=False)
    with pytest.raises(TypeError, match=r"state\['c'\]"):
        pack({"a": 1, "c": lambda: 0}, trusted=True)
