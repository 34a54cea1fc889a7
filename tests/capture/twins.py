"""Two equal training set-ups: the step of the first runs as it is, that of the second captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilework.capture import Program, capture
from tilework.comm.world import current_world
from tilework.dtensor import DTensor

#: Makes a step, and a function that gives the tensors which it changes, by name.
Make = Callable[[], tuple[Callable[..., Any], Callable[[], Mapping[str, Tensor | None]]]]
Same = Callable[[Tensor, Tensor], bool]


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], dict[str, Tensor | None]]:
    """Gives a model's parameters, buffers and gradients, and the optimizer's states."""

    def tensors() -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = dict(model.named_parameters())
        found.update(model.named_buffers())
        found.update({f"{name}.grad": p.grad for name, p in model.named_parameters()})
        states = optimizer.state.values() if optimizer is not None else ()
        for number, state in enumerate(states):
            found.update(
                {f"state {number} {k}": v for k, v in state.items() if isinstance(v, Tensor)}
            )
        return found

    return tensors


def run_twins(
    make: Make,
    batches: Sequence[tuple[Any, ...]],
    after: Callable[[], None] = lambda: None,
    same: Same | None = None,
    **settings: Any,
) -> Program[..., Any]:
    """Run both steps on each batch, and compare all that they give and change, bit by bit.

    Args:
        make: Makes one of the two set-ups.
        batches: The arguments of each call.
        after: Called after each batch.
        same: How tensors are compared; None: bit by bit.
        settings: Of ``capture``.
    """
    same = same or same_bits
    torch.manual_seed(11)
    eager, tensors = make()
    torch.manual_seed(11)
    step, others = make()
    program = capture(step, **settings)
    generator = current_world().generator or torch.default_generator
    states = [generator.get_state()] * 2
    for number, batch in enumerate(batches):
        results: list[Any] = []
        runs: tuple[Any, ...] = (eager, program)
        for twin, run in enumerate(runs):
            generator.set_state(states[twin])
            results.append(tree_leaves(run(*batch)))
            states[twin] = generator.get_state()
        for mine, other in zip(*results, strict=True):
            is_tensor = isinstance(mine, Tensor)
            equal = same(mine, other) if is_tensor else (type(other), other) == (type(mine), mine)
            assert equal, f"result of call {number}"
        expected, found = tensors(), others()
        assert list(expected) == list(found)
        for name, tensor in expected.items():
            assert _same_or_none(tensor, found[name], same), f"{name} after call {number}"
        assert torch.equal(*states), f"random numbers of call {number}"
        after()
    return program


def advance(schedulers: list[Any]) -> None:
    """One step of each scheduler."""
    for each in schedulers:
        each.step()


def _same_or_none(one: Tensor | None, other: Tensor | None, same: Same) -> bool:
    if one is None or other is None:
        return one is other
    return same(one, other)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if both have the same shape and elements; NaN equals NaN."""
    one, other = _local(one), _local(other)
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def nearly(one: Tensor, other: Tensor) -> bool:
    """True if both differ by no more than compilers' sums do."""
    return one.dtype == other.dtype and torch.allclose(
        _local(one).double(), _local(other).double(), rtol=1e-3, atol=1e-4
    )


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
