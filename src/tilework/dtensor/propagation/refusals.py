"""Refusals of calls, on all ranks alike and before anything is communicated.

Kernels look at little where there are no elements: a rank whose part of a tensor is empty would
accept ``float32 @ float64``, and wait later for the ranks that raised. And what torch refuses for
shapes or dims need not be gathered to hear it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.propagation.call import Call
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.propagation.strides import (
    input_strides,
    is_dense,
    is_expanded,
    without_memory,
)
from tilework.dtensor.spec import DTensorSpec, Ints, row_major

#: Most operators take them, if there is but one tensor.
_FLOATS = (torch.float32, torch.float64)
#: Full tensors of more elements are not made to try an operator that they may be right for.
_MOST_TRIED = 1 << 16
#: Of more elements, others of smaller sizes are made first.
_MOST_SHOWN = 1 << 12
#: Nor for one that torch refuses without memory.
_MOST_REFUSED = 1 << 22
#: For tensors of identity matrices.
_IDENTITY = None
#: How Python's own errors begin, where a rule trips over dims or arguments that are not there.
_TRIPPED = ("tuple index", "list index", "list assignment", "not enough values", "zip() argument")


@contextmanager
def refusals(call: Call) -> Iterator[None]:
    """Raise what torch does where this code trips over arguments that torch refuses."""
    try:
        yield
    except (IndexError, ValueError) as error:
        refusal = meta_refusal(call) if str(error).startswith(_TRIPPED) else None
        if refusal is None:
            raise
        raise refusal from None


def meta_refusal(call: Call) -> Exception | None:
    """The error that torch raises for a call without memory; None if there is none."""
    try:
        call.on_tensors(without_memory(call.tensors))
    except NotImplementedError:  # it has to see elements
        return None
    except Exception as error:
        return error
    return None


def seems_refused(call: Call) -> bool:
    """True if torch refuses a call, of which other code than its function is to run. Local.

    That code may broadcast what torch does not, and take arguments that torch knows nothing of.
    Mostly torch is asked with few elements, which takes microseconds.
    """
    if any(tensor.layout is not torch.strided for tensor in call.tensors):
        return False
    shapes, count = _shapes(call), sum(tensor.numel() for tensor in call.tensors)
    if count > _MOST_SHOWN:
        if _error_on_trial(call, _with_small_sizes(shapes), _dtypes(call), 0) is None:
            return False
        if count > _MOST_TRIED and meta_refusal(call) is None:
            return False
    return count <= _MOST_REFUSED and _equal_error(call) is not None


def _with_small_sizes(shapes: Sequence[Ints]) -> list[Ints]:
    """Shapes in which sizes are as equal to others as in these."""
    sizes = {0: 0, 1: 1}
    return [tuple([sizes.setdefault(size, len(sizes)) for size in shape]) for shape in shapes]


def raise_if_certain(refusal: Exception, call: Call) -> None:
    """Raise what torch says of a call if that is about shapes, dims and dtypes, not of elements.

    Then no rank has to gather elements to hear it. Of tensors without memory alone torch may raise
    what it does not of others: those of zeros and of ones must be refused alike, too.
    """
    if "meta" in str(refusal).lower() or sum(x.numel() for x in call.tensors) > _MOST_REFUSED:
        return
    error = _equal_error(call)
    if error is not None:
        advice = _advice_on_parts(call)
        raise type(error)(f"{error}.{advice}") if advice and type(error) is RuntimeError else error


def _advice_on_parts(call: Call) -> str:
    """Advice for a plain tensor that may be meant as this rank's part of another DTensor."""
    for tensor in call.tensors:
        shape = tuple(tensor.shape)
        for spec in () if isinstance(tensor, DTensorBase) else call.specs:
            if spec.takes_part and shape == spec.local_shape != spec.shape:
                return (
                    f" The plain tensor of shape {list(shape)} counts as the whole value, which "
                    f"every rank has. If it is this rank's part, as that of the DTensor of shape "
                    f"{list(spec.shape)} is: DTensor.from_local(tensor, mesh, placements)"
                )
    return ""


def _equal_error(call: Call) -> Exception | None:
    """The error that full tensors of zeros and of ones have in common; None if there is none."""
    shapes = _shapes(call)
    its = [  # what writes to an expanded tensor says more of that itself
        row_major(shape) if is_expanded(shape, strides) else strides
        for shape, strides in zip(shapes, input_strides(call.tensors), strict=True)
    ]
    first, second = _errors_on_trial(call, shapes, _dtypes(call), its) or (None, None)
    return first if type(first) is type(second) and str(first) == str(second) else None


def _shapes(call: Call) -> list[Ints]:
    return [tuple(tensor.shape) for tensor in call.tensors]


def _dtypes(call: Call) -> list[torch.dtype]:
    return [tensor.dtype for tensor in call.tensors]


def empty_parts_refusal(
    call: Call, specs: Sequence[DTensorSpec], runs_on_locals: bool
) -> Exception | None:
    """The error of the ranks that have elements, if some have none; None if there is none. Local.

    Args:
        call: A call.
        specs: The layouts of its tensors, as it needs them.
        runs_on_locals: True if its function runs on local tensors, with its other arguments.
    """
    dtypes = _dtypes(call)
    if all(0 in spec.shape for spec in specs):  # a rank without a batch would look at no other dim
        return _trial_refusal(call, [spec.shape for spec in specs], dtypes)
    if not any(spec.has_empty_ranges for spec in specs):
        return None
    if len(dtypes) == 1 and dtypes[0] in _FLOATS:
        return None
    shapes = _shapes_with_elements(specs) if runs_on_locals else _small_shapes(specs)
    if shapes is None:
        return None
    refusal = _trial_refusal(call, shapes, dtypes)
    if refusal is None:
        return None
    # What is refused whatever the dtypes are is so for the elements that it was tried with.
    rest = len(dtypes) - 1
    for others in (torch.float64, torch.int64):
        if _trial_refusal(call, shapes, [torch.float64, *[others] * rest]) is None:
            return refusal
    return None


def refuses_dtypes_of_out(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """True if torch does not cast what a function gives to the dtypes of its ``out=``. Local.

    Args:
        func: The function.
        args: Its arguments, of which ``out=`` is the last.
        kwargs: Those by name.
    """
    tensors = tensors_in([*args, *kwargs.values()])
    is_large = sum(tensor.numel() for tensor in tensors) > _MOST_TRIED

    def is_refused(number: int, has_out: bool) -> bool:
        full = map(partial(_with_room, number=number, has_memory=not is_large), tensors)
        its_args, its_kwargs = with_tensors(args, kwargs, full)
        if not has_out:
            del its_kwargs["out"]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                func(*its_args, **its_kwargs)
        except RuntimeError as error:
            return not (is_large and isinstance(error, NotImplementedError))
        return False

    return any(is_refused(number, True) and not is_refused(number, False) for number in (0, 1))


def _with_room(tensor: Tensor, number: int, has_memory: bool) -> Tensor:
    """A plain tensor like another, of one whole number, or of random elements: a positive definite
    matrix, if it is square.

    It has room for greater elements: torch writes past the end of some that are passed as ``out=``.
    """
    if not has_memory:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    full = torch.full((16 * tensor.numel(),), number, dtype=tensor.dtype)
    if full.is_floating_point() or full.is_complex():
        full.uniform_(generator=torch.Generator().manual_seed(0))
    full = full[: tensor.numel()].view(tensor.shape)
    if full.dim() > 1 and full.is_floating_point():
        full.diagonal(0, -2, -1).add_(full.shape[-1])
    return full


def _shapes_with_elements(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The local shapes on the first rank that has some of each dim that is not empty; or None."""
    for coordinate in product(*map(range, specs[0].mesh.spec.shape)):
        shapes = [spec.box_at(coordinate).sizes for spec in specs]
        if not any(
            size == 0 != full_size
            for shape, spec in zip(shapes, specs, strict=True)
            for size, full_size in zip(shape, spec.shape, strict=True)
        ):
            return shapes
    return None


def _small_shapes(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The shapes of the full tensors; None if one of them is large."""
    shapes = [spec.shape for spec in specs]
    return None if any(prod(shape) > _MOST_TRIED for shape in shapes) else shapes


def _trial_refusal(
    call: Call, shapes: Sequence[Ints], dtypes: Sequence[torch.dtype]
) -> Exception | None:
    """The error for tensors of these shapes and dtypes, whatever they hold; None if none."""
    errors = _errors_on_trial(call, shapes, dtypes)
    return None if errors is None else errors[1]


def _errors_on_trial(
    call: Call,
    shapes: Sequence[Ints],
    dtypes: Sequence[torch.dtype],
    its_strides: Sequence[Ints] | None = None,
) -> tuple[Exception, Exception] | None:
    """The errors for zeros and for ones; None if either is right, or it may not be tried.

    Indices have to be in range, and divisors not 0. Nor are identity matrices to be right, since
    many operators want matrices that have an inverse.
    """
    errors: list[Exception] = []
    for value in (0, 1, _IDENTITY):
        error = _error_on_trial(call, shapes, dtypes, value, its_strides)
        if error is None:
            return None
        errors.append(error)
    return errors[0], errors[1]


def _error_on_trial(
    call: Call,
    shapes: Sequence[Ints],
    dtypes: Sequence[torch.dtype],
    value: int | None,
    its_strides: Sequence[Ints] | None = None,
) -> Exception | None:
    """The error for tensors full of one value; None if there is none, or it may not be tried.

    Only torch's own operators are tried: others may do more than return a result, and so may
    functions that a call is given.
    """
    if not _is_of_torch(call.func) or any(map(callable, (*call.args, *call.kwargs.values()))):
        return None
    its_strides = its_strides or [row_major(shape) for shape in shapes]
    try:
        call.on_tensors([
            _full(tensor, shape, value, dtype, its)
            for tensor, shape, dtype, its in zip(
                call.tensors, shapes, dtypes, its_strides, strict=True
            )
        ])  # fmt: skip
    except Exception as error:
        return error
    return None


def _full(
    tensor: Tensor, shape: Ints, value: int | None, dtype: torch.dtype, its_strides: Ints
) -> Tensor:
    """A tensor of one value, on the device of another."""
    like: Any = {"dtype": dtype, "device": tensor.device}
    number = 1 if value is None else value
    if its_strides == row_major(shape):
        full = torch.full(shape, number, **like)
    else:
        steps = zip(shape, its_strides, strict=True)
        extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in steps)
        full = torch.full((extent,), number, **like).as_strided(shape, its_strides)
    if value is _IDENTITY and len(shape) > 1 and is_dense(shape, its_strides):
        full.copy_(torch.eye(*shape[-2:], **like))
    return full


def _is_of_torch(func: Any) -> bool:
    """True for torch's own functions, methods and operators."""
    owner = getattr(func, "__objclass__", func)  # a method's type
    module: str = getattr(owner, "__module__", None) or ""
    if module.startswith("torch._ops."):
        return module == "torch._ops.aten"
    return module.partition(".")[0] == "torch" and not module.startswith("torch._library.")
