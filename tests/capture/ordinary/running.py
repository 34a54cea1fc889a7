"""Programs by name, and the comparison of a program's run as it is with its captured run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

import tilework.capture
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.errors import CaptureError
from tilework.testing import run_ranks

#: Gives a step captured, or the step itself where the program runs as it is.
Capture = Callable[[Callable[..., Any]], Callable[..., Any]]
#: Gives the results of all calls, and the states at the end.
Body = Callable[[Capture], list[Any]]
#: A model, its loss, batches, and maybe an optimizer and what happens after each call.
Made = tuple[Any, ...]


@dataclass(frozen=True)
class OrdinaryProgram:
    """A program: what it runs, on each of so many ranks if not 0; why it is refused, or ""."""

    body: Body
    ranks: int
    refused: str

    def run(self, capture: Capture) -> list[Any]:
        """The results of a run, from fixed random numbers on."""
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        torch.set_grad_enabled(True)
        if not self.ranks:
            return [self.body(capture), torch.get_rng_state()]
        return run_ranks(self.ranks, partial(_on_rank, self.body, capture))


@dataclass
class Outcome:
    """A comparison: "equal", "WRONG", "refused", "error", or "invalid" if the program raises."""

    kind: str
    text: str
    records: list[int]
    seconds: float


PROGRAMS: dict[str, OrdinaryProgram] = {}


def program(*, name: str = "", ranks: int = 0, refused: str = "") -> Callable[[Body], Body]:
    """Add a program to the list, under the name of the function."""

    def added(body: Body) -> Body:
        named = name or body.__name__
        assert named not in PROGRAMS, named
        PROGRAMS[named] = OrdinaryProgram(body, ranks, refused)
        return body

    return added


def fitted(**settings: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Add a program that trains with ``fit``: the function gives the other arguments of that."""

    def added(make: Callable[[], Made]) -> Callable[[], Made]:
        program(name=make.__name__, **settings)(lambda capture: fit(capture, *make()))
        return make

    return added


def outcome(named: str, backend: str = "python") -> Outcome:
    """Run a program as it is and captured, and compare all results and states."""
    found = PROGRAMS[named]
    captured: list[Any] = []

    def capture(step: Callable[..., Any]) -> Callable[..., Any]:
        if backend == "plain":
            return step
        captured.append(tilework.capture.capture(step, backend=backend))
        return captured[-1]  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = perf_counter()
        try:
            plain = found.run(lambda step: step)
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}", [], 0)
        try:
            text = difference(plain, found.run(capture), exact=backend != "inductor")
            kind = "WRONG" if text else "equal"
        except CaptureError as error:
            kind, text = "refused", str(error)
        except Exception as error:
            kind, text = "error", f"{type(error).__name__}: {error}"
    records = [len(each.records) for each in captured]
    return Outcome(kind, text, records, perf_counter() - begin)


# -- the parts of programs -----------------------------------------------------------------------


def kept(value: Any) -> Any:
    """A copy of a result, which later calls do not change."""
    return tree_map(lambda x: _local(x).clone() if isinstance(x, Tensor) else x, value)


def calls(
    step: Callable[..., Any], batches: Iterable[tuple[Any, ...]], after: Any = None
) -> list[Any]:
    """The results of a step on each batch; ``after`` gets the number of each call."""
    results = []
    for number, batch in enumerate(batches, 1):
        results.append(kept(step(*batch)))
        if after is not None:
            after(number)
    return results


def states(*things: Any) -> list[Any]:
    """The states and gradients of modules, optimizers and tensors."""
    found: list[Any] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found.append([thing.state_dict(), {n: p.grad for n, p in thing.named_parameters()}])
        elif isinstance(thing, Optimizer):
            found.append([dict(state) for state in thing.state.values()])
            found.append([group["lr"] for group in thing.param_groups])
        else:
            found.append(thing)
    return [kept(each) for each in found]


def fit(
    capture: Capture,
    model: nn.Module,
    loss: Callable[..., Tensor],
    batches: Iterable[tuple[Any, ...]],
    optimizer: Optimizer | None = None,
    after: Any = None,
) -> list[Any]:
    """Train with the plainest step, eight calls or more."""
    # Where a gradient is nothing but rounding, a small eps would make a step of it.
    opt = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    def step(*batch: Any) -> Any:
        opt.zero_grad()
        value: Any = loss(*batch)
        value.backward()
        opt.step()
        return value.detach()

    return [*calls(capture(step), batches, after), *states(model, opt)]


# -- comparing -----------------------------------------------------------------------------------


def _on_rank(body: Body, capture: Capture, rank: int) -> list[Any]:
    results = body(capture)
    generator = current_world().generator
    assert generator is not None
    return [results, generator.get_state()]


def _local(tensor: Tensor) -> Tensor:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return local.to_dense() if local.layout == torch.sparse_coo else local


def difference(plain: Any, other: Any, exact: bool) -> str:
    """The first leaf that differs; "" if none does."""
    one, two = tree_leaves(plain), tree_leaves(other)
    if len(one) != len(two):
        return f"{len(one)} values, captured {len(two)}"
    for number, (x, y) in enumerate(zip(one, two, strict=True), 1):
        if not (_same(x, y) if exact else _near(x, y)):
            return f"value {number} of {len(one)}: {_short(x, y)}, captured {_short(y, x)}"
    return ""


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and bool(x == y or (x != x and y != y))
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _near(x: Any, y: Any) -> bool:
    if _same(x, y):
        return True
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        return True  # the generator's state: Inductor may leave numbers out that nobody reads
    if isinstance(x, float) and isinstance(y, float):
        x, y = torch.tensor(x), torch.tensor(y)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype != y.dtype:
        return False
    return x.shape == y.shape and torch.allclose(x, y, 1e-3, 1e-3, equal_nan=True)


def _short(x: Any, y: Any) -> str:
    """The value, or of a tensor the shape and the first elements that differ from another."""
    if not isinstance(x, Tensor):
        return repr(x)[:40]
    if isinstance(y, Tensor) and x.shape == y.shape:
        return f"{tuple(x.shape)} {x[x != y][:3].tolist()}"
    return f"{tuple(x.shape)} {x.dtype}"
