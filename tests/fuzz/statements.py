"""Statements of random programs, as text. Those that torch refuses are tried and left out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import habits
from tilework.dtensor.propagation.strides import is_dense

Tensors = Mapping[str, Tensor]


class Chooser:
    """Chooses for one statement.

    Args:
        rng: Chooses.
        tensors: What the program has so far.
        mesh: The shape of the mesh.
        new: The name of the statement's result.
    """

    def __init__(self, rng: random.Random, tensors: Tensors, mesh: Sequence[int], new: str) -> None:
        self.rng, self.tensors, self.mesh, self.new = rng, tensors, mesh, new

    def any(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str:
        """The name of a tensor of numbers, later ones more often."""
        names = [name for name, t in self.tensors.items() if t.is_floating_point() and fits(t)]
        if not names:
            raise LookupError
        return names[max(self.rng.randrange(len(names)), self.rng.randrange(len(names)))]

    def other(self, target: str) -> str:
        """A tensor that shares no memory with what is written to: its name begins the text."""
        name = target.partition("[")[0].partition(".")[0]
        memory = self.tensors[name].untyped_storage()._cdata
        return self.any(lambda t: t.untyped_storage()._cdata != memory)

    def like(self, name: str) -> str:
        """A tensor of the same shape as another."""
        return self.any(lambda t: t.shape == self.tensors[name].shape)

    def of(self, *values: Any) -> Any:
        """One of some values."""
        return self.rng.choice(values)

    def text(self, *texts: str) -> str:
        """One of some texts."""
        return self.rng.choice(texts)

    def dim(self, name: str) -> int:
        """A dim of a tensor."""
        ndim = self.tensors[name].dim()
        if not ndim:
            raise LookupError
        return self.rng.randrange(-ndim, ndim)

    def at(self, name: str, dim: int) -> int:
        """An index in a dim."""
        size = self.tensors[name].shape[dim]
        if not size:
            raise LookupError
        return self.rng.randrange(-size, size)

    def range(self, name: str, dim: int) -> tuple[int, int]:
        """The start and the length of a range in a dim."""
        size = self.tensors[name].shape[dim]
        start = self.rng.randint(0, size)
        return start, self.rng.randint(0, size - start)

    def placements(self, shape: Sequence[int], partial: bool = True) -> str:
        """Placements for a tensor of a shape."""
        partials = [self.of("P", "P", "P", "PA", "PM")] if partial else []
        ways = ["R", *[f"S{dim}" for dim in range(len(shape))] * 2, *partials]
        words = [self.rng.choice(ways) for _ in self.mesh]
        for axis, word in enumerate(words):
            if word.startswith("S") and words.count(word) == 1 and self.rng.random() < 0.2:
                words[axis] += self._sizes(shape[int(word[1:])], self.mesh[axis])
        return " ".join(words)

    def _sizes(self, total: int, count: int) -> str:
        """Sizes of shards, some of them maybe 0, as text."""
        cuts = sorted(self.rng.randint(0, total) for _ in range(count - 1))
        ends = zip([0, *cuts], [*cuts, total], strict=True)
        return f"({','.join(str(stop - start) for start, stop in ends)})"

    def number(self) -> float:
        """A number."""
        return float(self.of(2, 0.5, -1.5, 0.25, 0, -1))


def basic_index(choose: Chooser, name: str) -> str:
    """An index of numbers, ranges, None and Ellipsis."""
    items = []
    for dim in range(choose.rng.randint(1, max(1, choose.tensors[name].dim()))):
        size = choose.tensors[name].shape[dim] if choose.tensors[name].dim() else 0
        kind = choose.rng.random()
        if kind < 0.35 and size:
            items.append(str(choose.at(name, dim)))
        elif kind < 0.75:
            start, length = choose.range(name, dim) if size else (0, 0)
            step = choose.of("", "", ":2")
            items.append(f"{start or ''}:{start + length}{step}")
        else:
            items.append(":")
    if choose.rng.random() < 0.15:
        items.insert(choose.rng.randint(0, len(items)), choose.of("None", "..."))
    return ", ".join(items)


def _view(c: Chooser) -> str:
    x = c.any()
    kind = c.of(*_WITHOUT_ARGUMENTS, *_VIEWS, *_VIEWS, "view", "reshape", "reshape")
    if kind in _WITHOUT_ARGUMENTS:
        return f"{x}.{kind}"
    if kind in _VIEWS:
        return f"{x}.{kind}({_VIEWS[kind](c, x, c.dim(x))})"
    sizes = list(c.tensors[x].shape)
    count = max(c.tensors[x].numel(), 1)
    first = c.of(*[n for n in range(1, count + 1) if count % n == 0])
    return f"{x}.{kind}({c.of([first, -1], [-1], [-1, first], sizes, [1, *sizes])})"


def _shuffled(c: Chooser, x: str, dim: int) -> str:
    order = list(range(c.tensors[x].dim()))
    c.rng.shuffle(order)
    return str(order)


def _expanded(c: Chooser, x: str, dim: int) -> str:
    sizes = [c.of(2, 3) if size == 1 else size for size in c.tensors[x].shape]
    return str([c.of(2), *sizes] if c.rng.random() < 0.3 else sizes)


def _ranged(c: Chooser, x: str, dim: int) -> str:
    start, length = c.range(x, dim)
    return f"{dim}, {start}, {length}"


_WITHOUT_ARGUMENTS = (
    *("T", "mT", "H", "data", "flatten()", "ravel()", "contiguous()", "detach()", "t()"),
    "squeeze()",
)
#: The arguments of each view, given a tensor's name and a dim of it.
_VIEWS: Mapping[str, Callable[[Chooser, str, int], str]] = {
    "transpose": lambda c, x, dim: f"{dim}, {c.dim(x)}",
    "swapaxes": lambda c, x, dim: f"{dim}, {c.dim(x)}",
    "movedim": lambda c, x, dim: f"{dim}, {c.dim(x)}",
    "permute": _shuffled,
    "unsqueeze": lambda c, x, dim: f"{dim}",
    "squeeze": lambda c, x, dim: f"{dim}",
    "narrow": _ranged,
    "select": lambda c, x, dim: f"{dim}, {c.at(x, dim)}",
    "diagonal": lambda c, x, dim: f"{c.of(-1, 0, 0, 1)}, {dim}, {c.dim(x)}",
    "unfold": lambda c, x, dim: f"{dim}, {c.of(1, 2)}, {c.of(1, 2)}",
    "expand": _expanded,
    "unflatten": lambda c, x, dim: f"{dim}, ({c.of(1, 2, 3)}, -1)",
    "view_as": lambda c, x, dim: x,
}


def _index(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0)
    return f"{x}[{basic_index(c, x)}]"


def _index_by_tensors(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0 and t.shape[0] > 0)
    size = c.tensors[x].shape[0]
    numbers = [c.rng.randrange(-size, size) for _ in range(c.rng.randint(0, 3))]
    long = ", dtype=torch.long" if not numbers else ""
    form = c.of("{x}[torch.tensor({n}{l})]", "{x}[index({n}, {p!r})]", "{x}[{n}]", "{x}[..., 0]",
                "{x}[{x} > 0.3]", "{x}.index_select(0, torch.tensor({n}{l}))")  # fmt: skip
    placements = c.placements([len(numbers)], partial=False)
    if "index(" in form and not numbers:
        raise LookupError
    return str(form.format(x=x, n=numbers, l=long, p=placements))


def _pieces(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0)
    d = c.dim(x)
    size = c.tensors[x].shape[d]
    call = c.of(f"split({c.rng.randint(1, max(size, 1))}, {d})", f"chunk({c.of(2, 3)}, {d})",
                f"unbind({d})", f"tensor_split({c.of(2, 3)}, {d})")  # fmt: skip
    return f"{x}.{call}[{c.of(0, -1)}]"


def _compute(c: Chooser) -> str:
    x = c.any()
    return c.of(*_RESULTS)(c, x)  # type: ignore[no-any-return]


def _unary(c: Chooser, x: str) -> str:
    return f"{x}.{c.of('sin', 'tanh', 'neg', 'abs', 'relu', 'square', 'sigmoid', 'exp')}()"


def _binary(c: Chooser, x: str) -> str:
    return f"torch.{c.of('add', 'mul', 'maximum', 'minimum', 'sub')}({x}, {c.any()})"


def _along(c: Chooser, x: str) -> str:
    return f"{x}.{c.of('sum', 'mean', 'amax', 'cumsum', 'softmax', 'prod')}({c.dim(x)})"


_RESULTS: Sequence[Callable[[Chooser, str], str]] = (
    _unary,
    _binary,
    _along,
    lambda c, x: f"{x} {c.of('+', '*', '-')} {c.number()}",
    lambda c, x: f"{x} {c.of('+', '*', '-')} {c.like(x)}",
    lambda c, x: f"{x}.{c.of('sum', 'mean', 'max', 'prod')}()",
    lambda c, x: f"{x} @ {c.any(lambda t: t.dim() > 0)}",
    lambda c, x: f"{x} * plain({tuple(c.tensors[x].shape)}, {c.rng.randint(0, 9)})",
    lambda c, x: f"torch.where({x} > 0.3, {x}, {c.of(c.number(), c.like(x))})",
    lambda c, x: f"{x}.{c.of('clone', 'double', 'flip', 'tril')}({c.of('', '', '0')})",
    lambda c, x: f"torch.nn.functional.layer_norm({x}, ({c.tensors[x].shape[c.dim(x)]},))",
    lambda c, x: f"recomputed(lambda a: (a * 2).sin() + a, {x}, reentrant={c.of(True, False)})",
)


def _join(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0)
    d = c.dim(x)
    shape = c.tensors[x].shape
    return f"torch.{c.of('cat', 'cat', 'stack')}([{x}, {c.any(lambda t: t.shape == shape)}], {d})"


def _scatter(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0)
    d, at = c.dim(x), 0
    at = c.at(x, d)
    rest = list(c.tensors[x].shape)
    del rest[d]
    source = c.any(lambda t: list(t.shape) == rest)
    if c.rng.random() < 0.5:
        return f"{x}.select_scatter({source}, {d}, {at}).clone()"
    return f"{x}.slice_scatter({x}.narrow({d}, 0, 1), {d}, 0, 1).clone()"


def _move(c: Chooser) -> str:
    x = c.any()
    return f"moved({x}, {c.placements(c.tensors[x].shape)!r})"


# -- statements that write -------------------------------------------------------------------


def _part(c: Chooser) -> str:
    """A tensor, or a view of one."""
    x = c.any()
    if c.rng.random() < 0.5 or not c.tensors[x].dim():
        return x
    return f"{x}[{basic_index(c, x)}]{c.of('', '', '.data', '.detach()', '.t()')}"


def _write(c: Chooser) -> str:
    x = _part(c)
    match c.of(*range(8)):
        case 0:
            return f"{x}.{c.of('add_', 'mul_', 'fill_', 'sub_')}({c.number()})"
        case 1:
            return f"{x}.{c.of('add_', 'mul_', 'copy_', 'sub_')}({c.other(x)})"
        case 2:
            return f"{x}.{c.of('zero_', 'sin_', 'neg_', 'relu_', 'abs_')}()"
        case 3:
            return f"{x}.clamp_(-1.0, 1.0)"
        case 4:
            name = c.any()
            mask = f"{name} > 0.3"
            return f"{name}.masked_fill_({mask}, {c.number()})"
        case 5:
            name = c.any(lambda t: t.dim() > 0)
            return f"{name} {c.of('+=', '*=', '-=')} {c.number()}"
    return f"{x}.addcmul_({c.other(x)}, {c.other(x)}, value=0.5)"


def _write_item(c: Chooser) -> str:
    x = c.any(lambda t: t.dim() > 0)
    index = c.of(basic_index(c, x), f"{x} > 0.3")
    value = str(c.number()) if c.rng.random() < 0.5 else c.other(x)
    return f"{x}[{index}] {c.of('=', '=', '+=', '*=')} {value}"


def _write_list(c: Chooser) -> str:
    x, y = _part(c), _part(c)
    return c.text(
        f"torch._foreach_mul_([{x}], {c.number()})",
        f"torch._foreach_zero_([{x}])",
        f"torch._foreach_copy_([{x}], [{c.other(x)}])",
        # Gradients of lists in which tensors share memory are torch's secret.
        f"with torch.no_grad(): torch._foreach_mul_([{x}, {y}], {c.number()})",
        f"with torch.no_grad(): torch._foreach_add_([{x}, {y}], [{c.other(x)}, {c.other(y)}])",
    )


def _write_out(c: Chooser) -> str:
    x, y, out = c.any(), c.any(), _part(c)
    call = c.of(
        f"torch.mul({x}, {c.number()}", f"torch.add({_part(c)}, {y}", f"torch.cat([{x}, {x}]"
    )
    names = {"torch": torch, **{name: t.detach() for name, t in c.tensors.items()}}
    try:
        given, result = eval(out, names), eval(f"{call})", names)
    except Exception:
        raise LookupError from None
    inputs = [t for name, t in c.tensors.items() if re.search(rf"\b{name}\b", call)]
    shared = any(t.untyped_storage()._cdata == given.untyped_storage()._cdata for t in inputs)
    dense = all(is_dense(tuple(t.shape), t.stride()) for t in [given, *inputs])
    if given.shape != result.shape or (shared and not dense):  # resized, or read when it is written
        raise LookupError
    return f"{call}, out={out})"


def _write_local(c: Chooser) -> str:
    return f"write_local({_part(c)}, {c.number()})"


def _become_view(c: Chooser) -> str:
    x = c.any(lambda t: not t.requires_grad)
    text = c.text(
        f"{x}.t_()",
        f"{x}.transpose_({c.dim(x)}, {c.dim(x)})",
        f"{x}.unsqueeze_({c.dim(x)})",
        f"{x}.squeeze_({c.of('', c.dim(x))})",
        f"{x}.swapaxes_({c.dim(x)}, {c.dim(x)})",
    )
    return f"{c.of(*_MODES)} {text}" if c.rng.random() < 0.2 else text


def _detach(c: Chooser) -> str:
    return f"{c.any()}.detach_()"


def _gradient(c: Chooser) -> str:
    of = c.any(lambda t: t.requires_grad)
    to = c.any(lambda t: t.requires_grad and not (t._is_view() and t._version))
    return f"gradient({of}, {to})"


def _refused(c: Chooser) -> str:
    """A statement of a kind that torch often refuses."""
    x = c.any()
    y = c.any()
    # Results of einsum and tensordot are views, for torch, of what nobody else has.
    bases = [id(t) for t in c.tensors.values()]
    base = c.tensors[x]._base
    if base is not None and id(base) not in bases:
        x = y = c.any(lambda t: t._base is None or id(t._base) in bases)
    return c.text(
        f"{x}.add_({y})", f"{x}.copy_({y})", f"{x}[{basic_index(c, x)}] = {y}",
        f"{x}.view({[*reversed(c.tensors[x].shape)]})", f"{x}.mul_(2.0)", f"{x} @ {y}",
        f"{x}.transpose({c.rng.randint(-3, 3)}, 1)", f"{x}.narrow(0, 1, {c.rng.randint(1, 5)})",
        f"{x}[{c.rng.randint(-5, 5)}]", f"torch.cat([{x}, {y}])", f"{x}.squeeze({c.of(0, 2)})",
        f"torch._foreach_add_([{x}], [{y}])", f"{x}.unfold(0, {c.rng.randint(1, 5)}, 1)",
        f"{x}.detach_()", f"{x}.expand({[2, *c.tensors[y].shape]})", f"{x}.t_()",
        f"{x}[{y} > 0.3]",
        f"{x}[[{c.rng.randint(-5, 5)}]]",
    )  # fmt: skip


def _watch(c: Chooser) -> str:
    # Of a view that shows what was written, hooks see what torch computes anew from its base.
    # And with a hook, a tensor gives those that follow to its place in the graph at the first.
    x = c.any(
        lambda t: t.requires_grad and not (t._is_view() and t._version) and not t._backward_hooks
    )
    return f"watch({x}, {x!r})"


_VALUES: Sequence[tuple[Callable[[Chooser], str], float]] = (
    *((_view, 9), (_index, 5), (_index_by_tensors, 2), (_pieces, 2), (_compute, 6), (_join, 2)),
    *((_scatter, 1), (_move, 2), (_gradient, 1), (habits.read, 13)),
)
_WRITES: Sequence[tuple[Callable[[Chooser], str], float]] = (
    *((_write, 7), (_write_item, 4), (_write_list, 2), (_write_out, 2), (_write_local, 1)),
    *((_become_view, 1), (_watch, 1), (_detach, 0.3), (habits.write, 9)),
)
_MODES = ("with torch.no_grad():", "with torch.inference_mode():", "with torch.enable_grad():")


def statement(c: Chooser) -> str:
    """A statement at random.

    Raises:
        LookupError: The program has no tensors for the kind of statement that was chosen.
    """
    makes = c.rng.random() < 0.55
    kinds, weights = zip(*(_VALUES if makes else _WRITES), strict=True)
    kind = c.rng.choices(kinds, weights)[0]
    text: str = kind(c)
    if makes:
        text = f"{c.new} = {text}"
    moded = kind not in (_become_view, _gradient) and not text.startswith(("with ", "for "))
    if moded and c.rng.random() < 0.22:
        mode = _MODES[0] if makes or c.rng.random() < 0.5 else c.of(*_MODES)
        # Of what is given data of inference mode, torch's writes are neither refused nor recorded.
        if mode != _MODES[1] or ".data = " not in text:
            text = f"{mode} {text}"
    return text


def refused_statement(c: Chooser) -> str:
    """A statement that torch may refuse."""
    return _refused(c) if c.rng.random() < 0.7 else statement(c)


def first_statement(c: Chooser, name: str) -> str:
    """The statement that makes a tensor from nothing."""
    shape = c.of(*SHAPES)
    placements, seed = c.placements(shape), c.rng.randint(0, 99)
    if c.rng.random() < 0.1 and len(shape) and len(c.mesh) == 1:
        return f"{name} = data({shape}, {seed}, 'R')"
    if c.rng.random() < 0.6:
        return f"{name} = leaf({name!r}, {shape}, {seed}, {placements!r})"
    return f"{name} = data({shape}, {seed}, {placements!r})"


SHAPES = (
    *((4, 4), (4, 4), (4, 6), (5, 3), (6,), (3,), (1, 6), (2, 3, 4), (2, 3, 4), (), (0, 4), (3, 1)),
    *((7, 2), (2, 2, 2), (1,)),
)
