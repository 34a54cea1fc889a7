"""Random small programs: whatever operators follow each other, DTensors give what tensors give."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.dtensor.op_checks import Call, Layout, add_note, describe, noting_gatherings, run_on
from tilework.dtensor import DTensor
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

MESHES = ((2,), (3,), (2, 2))
SHAPES = ((4, 6), (6, 4), (6,), (5, 3), (1, 6), (2, 3, 4), (), (0, 4))
#: How many programs to try; more: TILEWORK_PROGRAMS=5000 python -m pytest -k random_programs
PROGRAMS = int(os.environ.get("TILEWORK_PROGRAMS", "60"))

#: Changes the list of tensors that a program works with.
Step = Callable[[list[Tensor]], None]


class Maker:
    """Makes a program step by step, running it on plain tensors to know what fits.

    Args:
        draw: Chooses.
        tensors: What it begins with.
        mesh: The shape of the mesh that it is to run on.
    """

    def __init__(self, draw: Any, tensors: Sequence[Tensor], mesh: tuple[int, ...]) -> None:
        self.draw, self.mesh = draw, mesh
        self.tensors = list(tensors)
        self.steps: list[Step] = []
        self.text: list[str] = []

    def add(self) -> None:
        """Add a step."""
        kind = self.draw(st.sampled_from(sorted(KINDS)))
        made = KINDS[kind](self)
        if made is None:
            return
        text, step = made
        tried = list(self.tensors)
        try:
            step(tried)
        except RuntimeError:  # such as in place on what is expanded: no program
            return
        self.tensors = tried
        self.steps.append(step)
        self.text.append(f"{kind}: {text}")

    def pick(self, fits: Callable[[Tensor], bool] = lambda one: True) -> int | None:
        """One of the tensors, by number."""
        found = [i for i, one in enumerate(self.tensors) if fits(one)]
        return self.draw(st.sampled_from(found)) if found else None

    def number(self, low: int, high: int) -> int:
        """A number, both ends included."""
        found: int = self.draw(st.integers(low, high))
        return found

    def choose(self, values: Sequence[Any]) -> Any:
        """One of some values."""
        return self.draw(st.sampled_from(list(values)))


Made = tuple[str, Step] | None


def _unary(maker: Maker) -> Made:
    name = maker.choose(["sin", "exp", "neg", "abs", "sigmoid", "relu", "square", "tanh"])
    at = maker.pick()
    assert at is not None
    return f"{name} {at}", lambda t: t.append(getattr(torch, name)(t[at].clamp(-3, 3)))


def _binary(maker: Maker) -> Made:
    name = maker.choose(["add", "sub", "mul", "maximum"])
    a = maker.pick()
    assert a is not None
    shape = maker.tensors[a].shape
    b = maker.pick(lambda one: _broadcast(one.shape, shape))
    assert b is not None
    return f"{name} {a} {b}", lambda t: t.append(getattr(torch, name)(t[a], t[b]))


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _scalar(maker: Maker) -> Made:
    name, at, value = maker.choose(["add", "mul", "div"]), maker.pick(), maker.choose([2, 0.5, -3])
    assert at is not None
    return f"{name} {at} {value}", lambda t: t.append(getattr(torch, name)(t[at], value))


def _matmul(maker: Maker) -> Made:
    a = maker.pick(lambda one: one.dim() >= 1)
    if a is None:
        return None
    width = maker.tensors[a].shape[-1]
    b = maker.pick(lambda one: one.dim() in (1, 2) and one.shape[0] == width)
    if b is None:
        return None
    return f"{a} {b}", lambda t: t.append(torch.matmul(t[a], t[b]))


def _reduction(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 1 and one.numel() > 0)
    if at is None:
        return None
    name = maker.choose(["sum", "mean", "amax", "var", "logsumexp", "prod"])
    keep, dim = maker.choose([True, False]), maker.number(0, maker.tensors[at].dim() - 1)
    if name == "var" and maker.tensors[at].shape[dim] < 2:
        return None
    return (
        f"{name} {at} dim={dim} keepdim={keep}",
        lambda t: t.append(getattr(torch, name)(t[at], dim, keepdim=keep)),
    )


def _whole(maker: Maker) -> Made:
    name, at = maker.choose(["sum", "mean"]), maker.pick(lambda one: one.numel() > 0)
    if at is None:
        return None
    return f"{name} {at}", lambda t: t.append(getattr(torch, name)(t[at]))


def _along(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 1)
    if at is None:
        return None
    name = maker.choose(["softmax", "log_softmax", "cumsum"])
    dim = maker.number(-1, maker.tensors[at].dim() - 1)
    return f"{name} {at} dim={dim}", lambda t: t.append(getattr(torch, name)(t[at], dim))


def _view(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 2)
    if at is None:
        return None
    shape = maker.tensors[at].shape
    kind = maker.choose(["transpose", "flatten", "unflatten", "unsqueeze", "permute"])
    dim = maker.number(0, len(shape) - 2)
    if kind == "transpose":
        return f"transpose {at} {dim}", lambda t: t.append(t[at].transpose(dim, dim + 1))
    if kind == "flatten":
        return f"flatten {at} {dim}", lambda t: t.append(t[at].flatten(dim, dim + 1))
    if kind == "unsqueeze":
        return f"unsqueeze {at} {dim}", lambda t: t.append(t[at].unsqueeze(dim))
    if kind == "permute":
        order = tuple(reversed(range(len(shape))))
        return f"permute {at} {order}", lambda t: t.append(t[at].permute(order))
    parts = [n for n in (2, 3) if shape[dim] % n == 0 and shape[dim]]
    if not parts or len(shape) > 3:
        return None
    n = maker.choose(parts)
    return f"unflatten {at} {dim} {n}", lambda t: t.append(t[at].unflatten(dim, (n, -1)))


def _reshape(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.numel() > 0)
    assert at is not None or not any(one.numel() for one in maker.tensors)
    if at is None:
        return None
    count = maker.tensors[at].numel()
    first = maker.choose([n for n in range(1, count + 1) if count % n == 0])
    return f"{at} {first} x -1", lambda t: t.append(t[at].reshape(first, -1))


def _index(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 1 and one.shape[0] > 0)
    if at is None:
        return None
    size = maker.tensors[at].shape[0]
    start = maker.number(0, size - 1)
    stop = maker.number(start, size)
    index = maker.choose([
        start, slice(start, stop), slice(start, None, 2), (Ellipsis, slice(0, 1)), None,
        torch.tensor([start, 0, start]), torch.arange(size) % 2 == 0,
    ])  # fmt: skip
    return f"{at}[{index}]", lambda t: t.append(t[at][index])


def _join(maker: Maker) -> Made:
    a = maker.pick(lambda one: one.dim() >= 1)
    if a is None:
        return None
    shape = maker.tensors[a].shape
    b = maker.pick(lambda one: one.shape == shape)
    assert b is not None
    dim = maker.number(0, len(shape) - 1)
    name = maker.choose(["cat", "stack"])
    return f"{name} {a} {b} {dim}", lambda t: t.append(getattr(torch, name)([t[a], t[b]], dim))


def _split(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 1 and one.shape[0] > 1)
    if at is None:
        return None
    size = maker.number(1, maker.tensors[at].shape[0])
    return f"{at} by {size}", lambda t: t.extend(t[at].split(size)[:2])


def _where(maker: Maker) -> Made:
    at = maker.pick()
    assert at is not None
    return f"{at}", lambda t: t.append(torch.where(t[at] > 0, t[at], 0.5))


def _in_place(maker: Maker) -> Made:
    at = maker.pick()
    assert at is not None
    name, value = maker.choose([("add_", 2.0), ("mul_", -0.5), ("clamp_", -1.0), ("fill_", 3.0)])
    copied = maker.choose([True, False])

    def step(t: list[Tensor]) -> None:
        if copied:
            t[at] = t[at] * 1
        getattr(t[at], name)(value)

    return f"{name} {at} {value} copied={copied}", step


def _set_item(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 1 and one.shape[0] > 0)
    if at is None:
        return None
    start = maker.number(0, maker.tensors[at].shape[0] - 1)
    index = maker.choose([start, slice(start, None), (Ellipsis, 0)])
    if index == (Ellipsis, 0) and maker.tensors[at].shape[-1] == 0:
        return None

    def step(t: list[Tensor]) -> None:
        t[at] = t[at].clone()
        t[at][index] = 7.0

    return f"{at}[{index}] = 7", step


def _redistribute(maker: Maker) -> Made:
    at = maker.pick()
    assert at is not None
    dims = range(maker.tensors[at].dim())
    ways: list[Placement] = [Replicate(), Partial("sum"), *map(Shard, dims)]
    placements = tuple(maker.choose(ways) for _ in maker.mesh)

    def step(t: list[Tensor]) -> None:
        one = t[at]
        # Where nothing moves it shares memory.
        t[at] = (one.redistribute(placements=placements) if isinstance(one, DTensor) else one) * 1

    return f"{at} to {list(placements)}", step


def _layer(maker: Maker) -> Made:
    at = maker.pick(lambda one: one.dim() >= 2 and one.shape[-1] > 1)
    if at is None:
        return None
    width = maker.tensors[at].shape[-1]
    functional = torch.nn.functional
    return f"layer_norm {at}", lambda t: t.append(functional.layer_norm(t[at], (width,)))


KINDS: dict[str, Callable[[Maker], Made]] = {
    "unary": _unary,
    "binary": _binary,
    "scalar": _scalar,
    "matmul": _matmul,
    "reduction": _reduction,
    "whole": _whole,
    "along": _along,
    "view": _view,
    "reshape": _reshape,
    "index": _index,
    "join": _join,
    "split": _split,
    "where": _where,
    "in place": _in_place,
    "set item": _set_item,
    "redistribute": _redistribute,
    "layer": _layer,
}


def _tensor(draw: Any, number: int) -> Tensor:
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)) + 10 * number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _layout(draw: Any, tensor: Tensor, mesh: tuple[int, ...]) -> Layout | None:
    ways: list[Placement] = [Replicate(), Partial("sum"), *map(Shard, range(tensor.dim()))]
    return Layout(tuple(draw(st.sampled_from(ways)) for _ in mesh))


def known(program: Callable[..., Any], tensors: Sequence[Tensor]) -> Call:
    """What plain tensors give, which may warn; what they cannot do is no example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Call(program, tensors)
        except RuntimeError:  # such as in place on one of several views
            reject()


@settings(
    max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
@given(st.data())
def test_random_programs_give_what_plain_tensors_give(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    tensors = [_tensor(data.draw, i) for i in range(data.draw(st.integers(1, 3)))]
    layouts = [_layout(data.draw, one, mesh) for one in tensors]
    if data.draw(st.booleans()) and len(tensors) > 1:
        layouts[-1] = None
    maker = Maker(data.draw, tensors, mesh)
    for _ in range(data.draw(st.integers(1, 8))):
        maker.add()

    def program(*given: Tensor) -> list[Tensor]:
        values = [one * 1 for one in given]
        for step in maker.steps:
            step(values)
        return values

    call = known(program, tensors)

    def on_rank(rank: int) -> None:
        run_on(call, init_device_mesh("cpu", mesh), layouts, rtol=1e-6, atol=1e-6)

    try:
        with noting_gatherings():
            run_ranks(math.prod(mesh), on_rank)
    except Exception as error:
        shapes = [list(one.shape) for one in tensors]
        lines = [f"mesh {mesh}, layouts {describe(layouts)}, shapes {shapes}", *maker.text]
        add_note(error, "\n".join(lines))
        raise
