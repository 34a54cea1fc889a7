"""Calls from torch's database of operators: each form of each operator, with sample arguments."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.dtensor.op_checks import Call, Compare, Layout, Layouts
from tilework.layout import Partial, Placement, Replicate, Shard


def _seed(seed: int) -> None:
    """Seed what samples are drawn from; torch formats the stack for each absent accelerator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@cache
def _database() -> list[Any]:
    """torch's operators with their samples. The import takes seconds: only tests that run do it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
    for module in [*sys.modules.values()]:
        if hasattr(module, "wrapper_set_seed"):
            # Else random operators seem to give the same values every time.
            vars(module)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)
        if hasattr(module, "extract_test_fn"):
            # Called for each sample: it reads the sources of the whole stack for a unittest.
            vars(module)["extract_test_fn"] = lambda: None
    vars(common_utils)["set_rng_seed"] = _seed
    return list(op_db)


#: What is in memory that was not written to is anything.
_UNWRITTEN = ("empty",)


@dataclass(frozen=True)
class Form:
    """A way to call an operator.

    Args:
        name: "function", "method", "in place", "in place without gradients" or "out=".
        fn: Called with a sample's input, arguments, and (for out=) with what to write to.
    """

    name: str
    fn: Callable[..., Any]
    grads: bool = True


def named(info: Any) -> str:
    """The name of an operator, and of the variant of its samples."""
    variant: str = info.variant_test_name
    return f"{info.name}.{variant}" if variant else str(info.name)


def operators() -> list[Any]:
    """All operators of the database, one for each name."""
    found = {named(info): info for info in _database()}
    return [found[name] for name in sorted(found)]


def forms(info: Any) -> list[Form]:
    """The ways in which an operator can be called."""

    def function(input: Any, args: Any, kwargs: Any) -> Any:
        return info.op(input, *args, **kwargs)

    found = [Form("function", function)]
    if (method := info.method_variant) is not None:
        call: Any = lambda input, args, kwargs: method(input, *args, **kwargs)  # noqa: E731
        found.append(Form("method", call))
    if (in_place := info.inplace_variant) is not None:

        def on_copy(input: Any, args: Any, kwargs: Any) -> Any:
            return in_place(input.clone(), *args, **kwargs)

        def directly(input: Any, args: Any, kwargs: Any) -> Any:
            return in_place(input, *args, **kwargs)

        found.append(Form("in place", on_copy))
        found.append(Form("in place without gradients", directly, grads=False))
    if info.supports_out:

        def into(input: Any, args: Any, kwargs: Any, out: Any) -> Any:
            return info.op(input, *args, **kwargs, out=out)

        found.append(Form("out=", into, grads=False))
    return found


@dataclass(frozen=True)
class Case:
    """One call of the database with the layouts of its tensors."""

    operator: str
    form: str
    dtype: torch.dtype
    call: Call
    mesh: tuple[int, ...]
    layouts: Layouts
    #: As for ``run_on``.
    compare: Compare


def cases(
    info: Any,
    dtype: torch.dtype,
    samples: int,
    meshes: Sequence[tuple[int, ...]] = ((2,), (2, 2)),
    seed: int = 0,
    only: Sequence[str] | None = None,
    device: str = "cpu",
) -> Iterator[Case]:
    """Calls of one operator: what torch can do with plain tensors.

    Args:
        info: The operator.
        dtype: Of its samples.
        samples: How many samples at most.
        meshes: Each call is made on each.
        seed: For layouts.
        only: The forms.
        device: The kind of device that tensors are on.
    """
    chosen = spread(samples_of(info, dtype, 8 * samples), samples)
    for form in forms(info):
        if only is not None and form.name not in only:
            continue
        # Forms differ in how they are called: a few samples of each will do.
        its = chosen if form.name == "function" else spread(chosen, max(1, samples // 2))
        for number, sample in enumerate(its, seed % 4):
            call = _call(form, sample, device)
            if call is None:
                continue
            compare: Compare = "values" if _repeats(call) else "same"
            if any(word in info.name for word in _UNWRITTEN):
                compare = "shapes"
            for mesh in meshes:
                mixed = form.name == "function"
                layouts = some_layouts(call.tensors, mesh, number, seed, mixed)
                yield Case(named(info), form.name, dtype, call, mesh, layouts, compare)


def samples_of(info: Any, dtype: torch.dtype, most: int) -> list[Any]:
    torch.default_generator.manual_seed(0)
    found: list[Any] = []
    with _quiet(), contextlib.suppress(Exception):
        for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
            if sum(t.numel() for t in _tensors(sample)) <= 20_000:
                found.append(sample)
            if len(found) >= most:
                break
    return found


def _tensors(sample: Any) -> list[Tensor]:
    flat = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return [one for one in flat if isinstance(one, Tensor)]


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of a sequence, from all over it."""
    if len(values) <= most:
        return list(values)
    return [values[i * len(values) // most] for i in range(most)]


def _call(form: Form, sample: Any, device: str) -> Call | None:
    """The call, with as many gradients as torch has for it; None if torch cannot make it."""
    args = [sample.input, tuple(sample.args), dict(sample.kwargs)]
    if device != "cpu":
        args = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, args)
    tensors = [one for one in tree_flatten(args)[0] if isinstance(one, Tensor)]
    if not any(one.layout is torch.strided for one in tensors):
        return None
    graded: list[bool | None] = [True, None, False] if form.grads else [False]
    for grads in graded:
        first = next((t for t in tensors if t.is_floating_point()), None)
        if grads is None and first is not None:
            first.requires_grad_()
        with _quiet(), contextlib.suppress(Exception):
            return _out_call(form, args) if form.name == "out=" else _made(form.fn, args, grads)
    return None


def _made(fn: Callable[..., Any], args: Sequence[Any], grads: bool | None) -> Call:
    torch.default_generator.manual_seed(0)
    return Call(fn, args, grads)


def _out_call(form: Form, args: Sequence[Any]) -> Call | None:
    plain = _made(lambda input, args, kwargs: form.fn(input, args, kwargs, None), args, False)
    made = tuple(torch.empty_like(one) for one in plain.expected.results)
    call = _made(form.fn, [*args, made[0] if len(made) == 1 else made], False)
    return call if _agree(call, plain) else None


def _agree(one: Call, other: Call) -> bool:
    """Whether two forms give the same in torch itself, which those of fft.ihfft2 do not."""
    pairs = zip(one.expected.results, other.expected.results, strict=True)
    return all(torch.equal(_plain(a), _plain(b)) for a, b in pairs if isinstance(a, Tensor))


def _repeats(call: Call) -> bool:
    """Whether the same call gives the same values: it draws no random numbers."""
    return all(_gives_again(call, seed) for seed in (1, 2, 3))


def _gives_again(call: Call, seed: int) -> bool:
    with _quiet():
        torch.default_generator.manual_seed(seed)
        state = torch.default_generator.get_state()
        try:
            leaves = call.leaves()
            again = tree_flatten(call.on(leaves))[0]
        except Exception:
            return False
    # Algorithms that draw, svd_lowrank for one, come near the same values by chance.
    draws = not torch.equal(state, torch.default_generator.get_state())
    same = torch.equal if draws else _near
    return all(
        not isinstance(one, Tensor)
        or one.layout is not torch.strided
        or same(_plain(one), _plain(other))
        for one, other in zip(
            [*again, *leaves], [*call.expected.results, *call.expected.after], strict=True
        )
    )


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether they are the same but for rounding, which depends on where memory lies."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        return tensor.to(torch.complex128).nan_to_num()
    return tensor.to(torch.float64).nan_to_num() if tensor.is_floating_point() else tensor


def some_layouts(
    tensors: Sequence[Tensor], mesh: tuple[int, ...], number: int, seed: int, mixed: bool
) -> Layouts:
    """Layouts for a call's tensors: for the first two samples all tensors cut alike.

    With ``mixed``, some tensors stay plain.
    """
    random_ = random.Random(f"{seed} {number}")
    found: list[Layout | None] = []
    for one in tensors:
        if one.layout is not torch.strided:
            found.append(None)
            continue
        dims = one.dim()
        ways: list[Placement] = [Replicate(), *map(Shard, range(dims))]
        ways += [Shard(dim, turns=2) for dim in range(dims)]
        if one.is_floating_point() and one.dtype.itemsize > 1:
            ways.append(Partial("sum"))
        if number < 2 and len(mesh) == 1:
            first = Shard(0 if number == 0 else dims - 1) if dims else Replicate()
            found.append(Layout((first,)))
        elif mixed and random_.random() < 0.1:
            found.append(None)
        else:
            found.append(Layout(tuple(random_.choice(ways) for _ in mesh)))
    if all(one is None for one in found):
        first_strided = next(i for i, t in enumerate(tensors) if t.layout is torch.strided)
        found[first_strided] = Layout((Replicate(),) * len(mesh))
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def dtypes_of(info: Any, wanted: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Those of the dtypes that the operator has samples of; another if it has none of these."""
    has = info.supported_dtypes("cpu")
    return [one for one in wanted if one in has] or sorted(has, key=str)[:1]
