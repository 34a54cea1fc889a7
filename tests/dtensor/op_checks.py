"""Operators on DTensors against the same operators on plain tensors."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.rounding import assert_close
from tilework.comm.agreement import agree
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.dtensor.debug import causes
from tilework.dtensor.propagation.dtensor_call import content_hash
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import wrap
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))


#: What can be compared: "values", that values are the "same" on all ranks, or only "shapes".
Compare = Literal["values", "same", "shapes"]


class Layout(NamedTuple):
    """How one tensor lies."""

    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None = None


#: For each tensor of a call; None: it stays plain.
Layouts = Sequence[Layout | Sequence[Placement] | None]


# -- the plain call --------------------------------------------------------------------------


def add_note(error: Exception, text: str) -> None:
    """Add a note to an error; Python 3.10 has none."""
    if hasattr(error, "add_note"):
        error.add_note(text)


@contextmanager
def skipping_without_derivatives() -> Iterator[None]:
    """Skip the test if the installed torch has no derivative of an operator of plain tensors."""
    try:
        yield
    except RuntimeError as error:
        if "derivative for aten::" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")


def torch_computes(fn: Callable[[], object]) -> bool:
    """True if the installed torch computes what older ones refuse of plain tensors, too."""
    try:
        fn()
    except (IndexError, RuntimeError):
        return False
    return True


@dataclass
class Outcome:
    """What a call came to."""

    results: list[Any]
    structure: Any
    #: Each tensor argument afterwards, and its gradient.
    after: list[Tensor]
    grads: list[Tensor | None]
    #: Whether gradients could be computed at all.
    differentiable: bool = False


class Call:
    """A call of an operator with plain tensors, and what it gives.

    Args:
        fn: Called with the arguments; may write to its tensors.
        args: Tensors, others, and containers of them.
        grads: Whether floating tensors require gradients; None: those that do so already.
        seed: For the gradients of results.

    Raises:
        Whatever the call does; what its backward pass raises makes it not differentiable.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], grads: bool | None = True, seed: int = 0
    ) -> None:
        self.fn = fn
        flat, self.structure = tree_flatten(list(args))
        self.flat = flat
        self.places = [i for i, one in enumerate(flat) if isinstance(one, Tensor)]
        self.tensors: list[Tensor] = [flat[i] for i in self.places]
        self.graded = [
            (one.requires_grad if grads is None else grads) and _differentiable(one)
            for one in self.tensors
        ]
        self.seed = seed
        leaves = self.leaves()
        results, structure = tree_flatten(self.on(leaves))
        after = [one.detach().clone() for one in leaves]
        self.expected = Outcome(results, structure, after, [])
        self.cotangents = self._cotangents(results)
        try:
            backward(results, self.cotangents)
            self.expected.differentiable = any(one is not None for one in self.cotangents)
        except (RuntimeError, NotImplementedError):
            self.expected.differentiable = False
        self.expected.grads = [one.grad for one in leaves]

    def leaves(self) -> list[Tensor]:
        """Copies of the tensors, with their strides."""
        return [
            one.detach().clone().requires_grad_(graded)
            for one, graded in zip(self.tensors, self.graded, strict=True)
        ]

    def on(self, tensors: Sequence[Tensor]) -> Any:
        """Call with these tensors in place of the plain ones."""
        flat = list(self.flat)
        for place, one in zip(self.places, tensors, strict=True):
            flat[place] = one
        return self.fn(*tree_unflatten(flat, self.structure))

    def _cotangents(self, results: Sequence[Any]) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one)
            if isinstance(one, Tensor) and one.requires_grad and one.layout is torch.strided
            else None
            for one in results
        ]


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def backward(results: Sequence[Any], cotangents: Sequence[Tensor | None]) -> None:
    """The gradients of all leaves."""
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    for i, (result, cotangent) in enumerate(pairs):
        # A view of a leaf would hand its memory on as the leaf's gradient.
        result.backward(cotangent.clone(), retain_graph=i + 1 < len(pairs))


# -- the same on DTensors --------------------------------------------------------------------


def distributed(whole: Tensor, mesh: DeviceMesh, layout: Layout, seed: int = 0) -> DTensor:
    """A tensor that all ranks have, cut, and in random terms where the layout is partial."""
    spec = spec_of(mesh, layout.placements, whole.shape, layout.order)
    with torch.no_grad():
        local = spec.local_part(_term(whole.detach(), spec, seed))
        dense = torch.preserve_format if local.numel() else torch.contiguous_format
        local = local.clone(memory_format=dense)
    return wrap(local.requires_grad_(whole.requires_grad), spec)


def partial_tensor(whole: Tensor, mesh: DeviceMesh, op: str = "sum") -> DTensor:
    """A copy of a tensor, partial along all axes of a mesh."""
    return distributed(whole, mesh, Layout((Partial(op),) * mesh.ndim))


def _term(whole: Tensor, spec: DTensorSpec, seed: int) -> Tensor:
    """This rank's term of the whole value."""
    if not spec.partial_axes:
        return whole
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    here, count = 0, _terms(spec)
    if count == 1:
        return whole
    for axis in spec.partial_axes:
        here = here * spec.mesh.shape[axis] + coordinate[axis]
    generator = torch.Generator().manual_seed(seed)
    holder = torch.randint(0, count, whole.shape, generator=generator).to(whole.device)
    holds, other = holder == here, (holder + 1) % count == here
    op, zero = spec.reduce_op, torch.zeros_like(whole)
    if op in ("sum", "avg"):
        # Terms that add up exactly, and of which no function but a linear one does so.
        total = whole * count if op == "avg" else whole
        twice = torch.where(total.isfinite() & (total * 2).isfinite(), total * 2, total)
        return torch.where(holds, twice, torch.where(other, total - twice, zero).nan_to_num())
    if op == "product":
        two = torch.full_like(whole, 2)
        return whole / two ** (count - 1) if here == 0 else two
    off = torch.ones_like(whole) if op == "min" else -torch.ones_like(whole)
    return torch.where(holds, whole, whole + off)


@dataclass
class Seen:
    """What happened besides values."""

    #: Names of operators that were gathered.
    gathered: list[str] = field(default_factory=list)
    #: Collectives of each pass; filled where they are counted.
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    #: How results lie.
    placements: list[tuple[Placement, ...]] = field(default_factory=list)


class _Noted(threading.local):
    gathered: list[str] | None = None


_noted = _Noted()


@contextmanager
def noting_gatherings() -> Iterator[None]:
    """Note which operators are gathered, instead of warning."""
    before = causes.warn_gather

    def gathers(name: str, *_: Any, **__: Any) -> None:
        if _noted.gathered is not None:
            _noted.gathered.append(name)

    causes.warn_gather = gathers
    try:
        yield
    finally:
        causes.warn_gather = before


def run_on(
    call: Call,
    mesh: DeviceMesh,
    layouts: Layouts,
    *,
    compare: Compare = "values",
    tensors: Sequence[Tensor] | None = None,
    counting: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> Seen:
    """Make the call on DTensors on this rank, and compare all that it gives. Collective.

    Args:
        call: The call.
        mesh: The mesh.
        layouts: Of its tensors.
        compare: "values", "same" (random values, which all ranks have alike) or "shapes".
        tensors: The arguments, if they are to be used again.
        counting: Whether to count collectives.
        rtol: As for ``torch.testing.assert_close``.
        atol: Likewise.

    Raises:
        AssertionError: Something differs from the plain call.
    """
    tensors = inputs(call, mesh, layouts) if tensors is None else tensors
    return _run_on(call, tensors, _Close(compare, rtol, atol), counting)


def _run_on(call: Call, tensors: Sequence[Tensor], close: _Close, counting: bool) -> Seen:
    expected, seen = call.expected, Seen()
    _noted.gathered = seen.gathered
    before = _collectives() if counting else []
    results, structure = tree_flatten(call.on(tensors))
    if counting:
        seen.forward = _collectives()[len(before) :]
    assert structure == expected.structure, f"gives {structure}, plain gives {expected.structure}"
    for number, (got, want) in enumerate(zip(results, expected.results, strict=True)):
        close(got, want, f"result {number}")
        if isinstance(got, DTensor):
            seen.placements.append(got.placements)
    for number, (one, want) in enumerate(zip(tensors, expected.after, strict=True)):
        close(one.detach(), want, f"tensor {number} afterwards")
    if expected.differentiable:
        before = _collectives() if counting else []
        backward(results, call.cotangents)
        if counting:
            seen.backward = _collectives()[len(before) :]
        _compare_grads(call, tensors, close)
    _noted.gathered = None
    return seen


def inputs(call: Call, mesh: DeviceMesh, layouts: Layouts) -> list[Tensor]:
    """Copies of the call's tensors as the layouts say. Local."""
    return [
        leaf if layout is None else distributed(leaf, mesh, _layout(layout), i)
        for i, (leaf, layout) in enumerate(zip(call.leaves(), layouts, strict=True))
    ]


def _layout(given: Layout | Sequence[Placement]) -> Layout:
    return given if isinstance(given, Layout) else Layout(tuple(given))


def _compare_grads(call: Call, tensors: Sequence[Tensor], close: _Close) -> None:
    for number, (one, want) in enumerate(zip(tensors, call.expected.grads, strict=True)):
        what = f"gradient of tensor {number}"
        if isinstance(one, DTensor) and one._spec.reduce_op == "product":
            with (
                pytest.raises(NotImplementedError, match="a partial product")
                if want is not None
                else nullcontext()
            ):
                one.grad  # noqa: B018
            continue
        got = one.grad
        if want is None or got is None:
            assert got is want, f"{what} is {got}, plain gives {want}"
        elif isinstance(one, DTensor):
            spec = one._spec
            assert isinstance(got, DTensor), f"{what} is no DTensor"
            expected = spec.grad_spec
            assert got._spec == expected, f"{what} is laid out as {got._spec}, not as {expected}"
            close(got, want, what)
        else:
            close(got, want, what)


def _terms(spec: DTensorSpec) -> int:
    return math.prod(spec.mesh.shape[axis] for axis in spec.partial_axes)


@dataclass
class _Close:
    """Compares what a call on DTensors gave with what the plain call did."""

    compare: Compare
    rtol: float | None
    atol: float | None

    def __call__(self, got: Any, want: Any, what: str) -> None:
        if not isinstance(want, Tensor):
            same = type(got) is type(want) and (
                got == want or got != got or self.compare != "values"
            )
            assert same, f"{what} is {got!r}, plain gives {want!r}"
            return
        assert isinstance(got, Tensor), f"{what} is {got!r}, plain gives a tensor"
        if want.layout is not torch.strided:
            got, want = _dense(got), _dense(want)
        assert got.shape == want.shape, f"{what} has shape {got.shape}, plain {want.shape}"
        assert got.dtype == want.dtype, f"{what} has dtype {got.dtype}, plain {want.dtype}"
        assert got.requires_grad == want.requires_grad, (
            f"{what} has requires_grad={got.requires_grad}, plain {want.requires_grad}"
        )
        if isinstance(got, DTensor):
            spec = got._spec
            assert got._local_tensor.shape == spec.local_shape, (
                f"{what} has a part of shape {got._local_tensor.shape}, its layout {spec} says "
                f"{spec.local_shape}"
            )
            if self.compare == "values" and not spec.partial_axes:
                # Ranks that compare a part each do without the collective of a gather.
                got, want = got._local_tensor, spec.local_part(want)
            else:
                with torch.no_grad():
                    got = got.full_tensor()
            if self.compare == "same":
                digests = agree(lambda: content_hash(got))
                assert len(set(digests)) == 1, f"{what} differs between ranks"
        if self.compare == "values":
            assert_close(
                got.detach(),
                want.detach(),
                rtol=self.rtol,
                atol=self.atol,
                equal_nan=True,
                msg=lambda text: f"{what} is wrong: {text}\n{got}\n{want}",
            )


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _collectives() -> list[str]:
    """All that this rank has called, by name, oldest first."""
    entries = [entry for group in current_world().records for entry in group.flight_entries()]
    return [entry.what.partition(" ")[0] for entry in sorted(entries, key=lambda one: one.entered)]


# -- over meshes and placements --------------------------------------------------------------


def check_op(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    partial: Sequence[str] = ("sum",),
    most: int = 10,
    grads: bool | None = True,
    gathers: bool | None = None,
    plain: bool = False,
    layouts: Callable[[tuple[int, ...]], Sequence[Layouts]] | None = None,
    compare: Compare = "values",
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> list[Seen]:
    """Compare ``fn`` on DTensors with ``fn`` on plain tensors: results, writes and gradients.

    Each mesh has its own run of ranks, in which all placements are tried: replicated, cut along
    each dim (as chunks, and with sizes of their own), several axes on one dim in both orders,
    and in terms.

    Args:
        fn: Called with ``args``; it must use nothing else that ranks as threads would share.
        args: Plain tensors, other values, and containers of them.
        meshes: Shapes of meshes.
        partial: How terms that inputs may be in are reduced; empty: no input is partial.
        most: How many combinations of layouts to try on each mesh; all if there are no more.
        grads: Whether floating tensors require gradients; None: those that do so already.
        gathers: False: that no operator is gathered. True: that some is.
        plain: Whether tensors may also stay plain.
        layouts: The combinations to be tried on a mesh of a shape instead.
        compare: As for :func:`run_on`.
        rtol: As for ``torch.testing.assert_close``.
        atol: Likewise.
        seed: Of the choice among combinations, and of gradients.

    Returns:
        What was seen in each combination on the first rank.
    """
    call = Call(fn, args, grads, seed)
    found: list[Seen] = []
    for shape in meshes:
        tried = (
            list(layouts(shape))
            if layouts is not None
            else combinations(call.tensors, shape, partial, most, plain, seed)
        )

        def program(
            rank: int, shape: tuple[int, ...] = shape, tried: Sequence[Layouts] = tried
        ) -> list[Seen]:
            mesh = init_device_mesh("cpu", shape)
            seen = []
            for combination in tried:
                try:
                    one = run_on(call, mesh, combination, compare=compare, rtol=rtol, atol=atol)
                    if gathers is not None and call.tensors:
                        assert gathers == bool(one.gathered), f"gathered {one.gathered}"
                except Exception as error:
                    add_note(error, f"[mesh {shape}, layouts {describe(combination)}]")
                    raise
                seen.append(one)
            return seen

        with noting_gatherings():
            by_rank = run_ranks(math.prod(shape), program)
        assert all(seen == by_rank[0] for seen in by_rank), f"ranks saw different things: {by_rank}"
        found += by_rank[0]
    return found


def count_op(
    fn: Callable[..., Any],
    *args: Any,
    layouts: Layouts,
    mesh: tuple[int, ...] = (2,),
    grads: bool | None = True,
) -> Seen:
    """What a call takes, when it was made before: collectives forward and backward, by name.

    Values are compared as well. ``fn`` must not write to its arguments.
    """
    call = Call(fn, args, grads)

    def program(rank: int) -> Seen:
        made = init_device_mesh("cpu", mesh)
        tensors = inputs(call, made, layouts)
        first = run_on(call, made, layouts, tensors=tensors)
        for one in tensors:
            one.grad = None
        seen = run_on(call, made, layouts, tensors=tensors, counting=True)
        seen.gathered = first.gathered
        return seen

    with noting_gatherings():
        return run_ranks(math.prod(mesh), program)[0]


def combinations(
    tensors: Sequence[Tensor],
    shape: tuple[int, ...],
    partial: Sequence[str] = ("sum",),
    most: int = 10,
    plain: bool = False,
    seed: int = 0,
) -> list[Layouts]:
    """Layouts for tensors on a mesh: all there are if these are not too many, else some.

    Each call of this function draws others. A layout of a tensor repeats only when all of them have
    been drawn.
    """
    if not tensors:
        return [[]]
    random_ = random.Random(f"{seed} {random.random()}")  # conftest seeds the latter for each test
    choices = [_layouts(one, shape, partial, plain, random_) for one in tensors]
    if math.prod(map(len, choices)) <= most:
        return list(map(list, itertools.product(*choices)))
    decks = [_shuffled(its, random_) for its in choices]
    found: list[Layouts] = []
    while len(found) < most:
        picked = [next(deck) for deck in decks]
        if picked not in found:
            found.append(picked)
    return found


def _shuffled(layouts: Sequence[Layout | None], random_: random.Random) -> Iterator[Layout | None]:
    """Layouts in random order, all of them again and again."""
    while True:
        yield from random_.sample(layouts, len(layouts))


def _layouts(
    tensor: Tensor,
    shape: tuple[int, ...],
    partial: Sequence[str],
    plain: bool,
    random_: random.Random,
) -> list[Layout | None]:
    ops = partial if tensor.dtype is not torch.bool else ()
    dims = range(tensor.dim())
    one: list[Placement] = [Replicate(), *map(Shard, dims), *map(Partial, ops)]
    one += [Shard(dim, turns=2) for dim in dims]
    found: list[Layout | None] = [None] if plain else []
    for placements in itertools.product(one, repeat=len(shape)):
        if len({p.reduce_op for p in placements if isinstance(p, Partial)}) > 1:
            continue
        found.append(Layout(placements))
        shared = len(shape) == 2 and isinstance(placements[0], Shard)
        if shared and placements[0] == placements[1]:
            found.append(Layout(placements, (1, 0)))
    for dim, size in enumerate(tensor.shape):
        cuts = sorted(random_.choices(range(size + 1), k=shape[0] - 1))
        sizes = [b - a for a, b in itertools.pairwise([0, *cuts, size])]
        rest: list[Placement] = [Replicate()] * (len(shape) - 1)
        found.append(Layout((Shard(dim, tuple(sizes)), *rest)))
    return found


def describe(layouts: Layouts) -> str:
    """Layouts, in a line."""
    return ", ".join(
        "plain"
        if one is None
        else f"{list(one.placements)}{'' if one.order is None else f' in order {one.order}'}"
        if isinstance(one, Layout)
        else str(list(one))
        for one in layouts
    )
