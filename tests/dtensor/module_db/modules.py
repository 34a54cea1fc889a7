"""Modules of torch's database, with distributed parameters and inputs."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from tests.dtensor.op_checks import Layout, distributed
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from tilework.layout import Placement
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

#: How the parameters lie: as a plain module's, replicated, or sharded at random.
WAYS = ("plain", "replicated", "sharded")


@dataclass(frozen=True)
class Case:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: bool
    expected: list[Any]
    grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    buffers: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.name} {self.module} {self.kwargs}"


def infos() -> list[Any]:
    """All modules of the database. The import takes seconds: only tests that run do it."""
    from torch.testing._internal import common_modules, common_utils

    # It would seed torch's generators at each sample, with a lock that ranks wait for.
    vars(common_utils)["set_rng_seed"] = lambda *_: None
    return list(common_modules.module_db)


def cases(info: Any, training: bool, most: int) -> Iterator[Case]:
    """Calls of one module that torch can make with plain tensors."""
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
        )
        chosen = (
            [samples[i * len(samples) // most] for i in range(most)]
            if len(samples) > most
            else samples
        )
        for sample in chosen:
            if sample.forward_input is None:
                continue
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, TypeError):
                yield _case(info, sample, training)


def _case(info: Any, sample: Any, training: bool) -> Case:
    torch.default_generator.manual_seed(1)
    made = sample.constructor_input
    module = info.module_cls(*made.args, **made.kwargs).double().train(training)
    args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        module(*args, **kwargs)  # gives lazy modules their shapes
    plain, inputs = copy.deepcopy(module), _leaves(args, kwargs)
    results = _called(plain, inputs, args, kwargs)
    again = _called(copy.deepcopy(module), inputs, args, kwargs)
    draws = any(
        not torch.equal(a.detach(), b.detach()) for a, b in zip(results, again, strict=True)
    )
    _backward(results)
    return Case(
        info.name,
        module,
        args,
        kwargs,
        draws,
        [result.detach() for result in results],
        {name: p.grad for name, p in plain.named_parameters()},
        [leaf.grad for leaf in inputs],
        dict(plain.named_buffers()),
    )


def _leaves(args: Any, kwargs: Any) -> list[Tensor]:
    flat = tree_flatten((args, kwargs))[0]
    return [
        x.detach().clone().requires_grad_(x.is_floating_point())
        for x in flat
        if isinstance(x, Tensor)
    ]


def _called(module: nn.Module, leaves: Sequence[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    rest = iter(leaves)
    args, kwargs = tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (args, kwargs))
    return [x for x in tree_flatten(module(*args, **kwargs))[0] if isinstance(x, Tensor)]


def _backward(results: Sequence[Any]) -> None:
    losses = [
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(tuple(x.shape))).sum()
        for x in results
        if x.requires_grad
    ]
    if losses:
        sum(losses).backward()


# -- on DTensors -----------------------------------------------------------------------------


def problems(found: Sequence[Case], size: int = 2) -> list[str]:
    """What is wrong with cases, run on a mesh of ``size`` in each way."""

    def program(rank: int) -> list[str]:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (size,))
        wrong = []
        for number, case in enumerate(found):
            for way in WAYS:
                layouts = random.Random(f"{number} {way}")
                try:
                    _compare(case, mesh, way, layouts)
                except AssertionError as error:
                    wrong.append(f"{way}: {case}: {str(error)[:400]}")
        return wrong

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_ranks(size, program)[0]


def _compare(case: Case, mesh: DeviceMesh, way: str, layouts: random.Random) -> None:
    module = copy.deepcopy(case.module)
    if way != "plain":
        _distribute(module, mesh, way, layouts)
    leaves = _leaves(case.args, case.kwargs)
    inputs = [
        distributed(x, mesh, Layout((_some_placement(x, layouts, partial=True),))) for x in leaves
    ]
    results: list[Any] = _called(module, inputs, case.args, case.kwargs)
    for got, want in zip(results, case.expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if not case.draws:
            _close(got, want, "a result")
    _backward(results)
    if case.draws:
        return
    for name, p in module.named_parameters():
        _close(p.grad, case.grads[name], f"the gradient of {name}")
    for number, (leaf, want) in enumerate(zip(inputs, case.input_grads, strict=True)):
        _close(leaf.grad, want, f"the gradient of input {number}")
    for name, buffer in module.named_buffers():
        _close(buffer, case.buffers[name], name)


def _distribute(module: nn.Module, mesh: DeviceMesh, way: str, layouts: random.Random) -> None:
    def placed(x: Tensor) -> DTensor:
        sharded = way == "sharded"
        placement = _some_placement(x, layouts, partial=False) if sharded else Replicate()
        return distributed(x.detach(), mesh, Layout((placement,)))

    for part in module.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                part._parameters[name] = nn.Parameter(placed(p), requires_grad=p.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = distributed(buffer, mesh, Layout((Replicate(),)))
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()


def _some_placement(x: Tensor, layouts: random.Random, partial: bool) -> Placement:
    choices: list[Placement] = [Replicate(), *map(Shard, range(x.dim()))]
    if partial and x.is_floating_point():
        choices.append(Partial())
    return layouts.choice(choices)


def _close(got: Any, want: Tensor | None, what: str) -> None:
    if want is None or got is None:
        assert got is want, f"{what}: {got}, plain {want}"
        return
    value = got.detach()
    if isinstance(value, DTensor) and not value._spec.partial_axes:
        # Ranks that compare a part each do without the collective of a gather.
        assert value.shape == want.shape, what
        want = want[value._spec.local_box.slices]
        value = value._local_tensor
    elif isinstance(value, DTensor):
        value = value.full_tensor()
    assert_close(value, want, rtol=1e-6, atol=1e-7, equal_nan=True, msg=lambda m: f"{what}: {m}")
