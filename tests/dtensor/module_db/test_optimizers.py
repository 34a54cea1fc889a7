"""All optimizers of torch's database, in their options, for as many steps as a few."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import assert_close
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

STEPS = 2
#: Its gradients are sparse, of which DTensor has none.
OTHERS = {"Optimizer", "SparseAdam"}
NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in OTHERS
)


def info_of(name: str) -> Any:
    """The optimizer's options in the database. The import takes seconds: only tests do it."""
    from torch.testing._internal.common_optimizers import optim_db

    return next(info for info in optim_db if info.optim_cls is getattr(torch.optim, name))


def parameters(matrices_only: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 4), (4, 6)] if matrices_only else [(5, 4), (4,), (3, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def options(info: Any) -> Iterator[dict[str, Any]]:
    # Rounding decides where many steps of it end.
    few = {"max_iter": 3} if info.optim_cls is torch.optim.LBFGS else {}
    for given in info.optim_inputs_func("cpu"):
        if given.params is None:
            yield {**few, **given.kwargs}
    for foreach in (True,) if "foreach" in info.supported_impls else ():
        yield {"foreach": foreach}


def train(info: Any, params: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    optimizer = info.optim_cls(params, **copy.deepcopy(kwargs))

    def loss() -> Any:
        optimizer.zero_grad()
        total = sum(((p.sin() * p) ** 2).sum() for p in params)
        total.backward()
        return total

    for _ in range(STEPS):
        optimizer.step(loss)
    states = [
        state for p in params for _, state in sorted(optimizer.state[p].items(), key=lambda x: x[0])
    ]
    return [x for x in (*params, *states) if isinstance(x, Tensor)]


def parts(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank has of a tensor, and what it should have: together ranks compare all."""
    assert got.shape == want.shape
    if isinstance(got, DTensor) and not got._spec.partial_axes:
        return got._local_tensor, want[got._spec.local_box.slices]
    return (got.full_tensor() if isinstance(got, DTensor) else got), want


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_plain_parameters(name: str) -> None:
    info = info_of(name)
    whole = parameters(matrices_only=name == "Muon")
    cases = []
    for kwargs in options(info):
        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")
            cases.append((kwargs, train(info, [nn.Parameter(x.clone()) for x in whole], kwargs)))
    assert len(cases) > 3

    def placed(x: Tensor, mesh: DeviceMesh, number: int, way: str) -> nn.Parameter:
        mixed = way == "mixed" and number == 0
        if mixed:
            return nn.Parameter(x.clone())
        placement = Replicate() if way == "mixed" else Shard(0 if way == "rows" else x.dim() - 1)
        return nn.Parameter(distribute_tensor(x, mesh, [placement]))

    # Muon multiplies matrices in bfloat16.
    tolerance: Any = (
        {"rtol": 1e-2, "atol": 1e-3} if name == "Muon" else {"rtol": 1e-6, "atol": 1e-8}
    )

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for number, (kwargs, expected) in enumerate(cases):
            for way in ("mixed", ("rows", "columns")[number % 2]):
                params = [placed(x, mesh, number, way) for number, x in enumerate(whole)]
                found = train(info, params, kwargs)
                assert len(found) == len(expected)
                for got, want in zip(found, expected, strict=True):
                    assert_close(
                        *parts(got.detach(), want.detach()),
                        **tolerance,
                        msg=lambda m, k=kwargs, w=way: f"{name} {k} {w}: {m}",  # type: ignore[misc]
                    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, program)
