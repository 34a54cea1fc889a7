"""Refusals of calls, the same on all ranks and before anything is communicated.

Kernels check little if there are no elements: a rank with an empty part of a tensor would accept
``float32 @ float64``, and later wait for the ranks that raised. If torch refuses a call for shapes
or dims, it must be refused before anything is gathered for the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.propagation.dtensor_call import DTensorCall
from tilework.dtensor.propagation.strides import (
    input_strides,
    is_dense,
    is_expanded,
    without_memory,
)
from tilework.dtensor.spec import DTensorSpec, Ints, row_major

#: The dtypes that most operators with a single tensor accept.
_FLOATS = (torch.float32, torch.float64)
#: The most elements of full tensors made for a trial of a call that torch may accept.
_MOST_TRIED = 1 << 16
#: For tensors of more elements, a trial with smaller sizes comes first.
_MOST_SHOWN = 1 << 12
#: The same limit for a call that torch refuses on meta tensors.
_MOST_REFUSED = 1 << 22
#: Stands for identity matrices in a trial, instead of a number.
_IDENTITY = None
#: The first words of Python's errors when a rule reads dims or arguments that do not exist.
_TRIPPED = ("tuple index", "list index", "list assignment", "not enough values", "zip() argument")


def raise_torchs(error: IndexError | ValueError, call: DTensorCall) -> NoReturn:
    """Raise torch's error if this library's code failed on arguments that torch refuses."""
    refusal = meta_refusal(call) if str(error).startswith(_TRIPPED) else None
    if refusal is None:
        raise error
    raise refusal from None


def meta_refusal(call: DTensorCall) -> Exception | None:
    """The error that torch raises for the call on meta tensors; None if torch accepts it."""
    try:
        call.on_tensors(without_memory(call.tensors))
    except NotImplementedError:  # it has to see elements
        return None
    except Exception as error:
        return error
    return None


def seems_refused(call: DTensorCall) -> bool:
    """True if torch refuses a call that other code than torch's function will compute. Local.

    The other code may broadcast shapes that torch refuses, and accept arguments unknown to torch.
    torch's function is therefore tried, mostly on tensors of few elements, which takes
    microseconds.
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
    """Shapes of small sizes. Sizes that are equal in the given shapes stay equal."""
    sizes = {0: 0, 1: 1}
    return [tuple([sizes.setdefault(size, len(sizes)) for size in shape]) for shape in shapes]


def raise_if_certain(refusal: Exception, call: DTensorCall) -> None:
    """Raise torch's refusal of a call if it is about shapes, dims and dtypes, not elements.

    Then no rank gathers elements in vain. For meta tensors torch may raise errors that do not hold
    for real tensors. The refusal is certain only if torch also refuses zeros and ones, with the
    same error.
    """
    if "meta" in str(refusal).lower() or sum(x.numel() for x in call.tensors) > _MOST_REFUSED:
        return
    error = _equal_error(call)
    if error is not None:
        advice = _advice_on_parts(call)
        raise type(error)(f"{error}.{advice}") if advice and type(error) is RuntimeError else error


def _advice_on_parts(call: DTensorCall) -> str:
    """Advice, or "", on a plain tensor that may be meant as this rank's part of a DTensor."""
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


def _equal_error(call: DTensorCall) -> Exception | None:
    """The error that torch raises both on zeros and on ones; None if there is none."""
    shapes = _shapes(call)
    its = [  # an operator that writes to an expanded tensor raises a clearer error by itself
        row_major(shape) if is_expanded(shape, strides) else strides
        for shape, strides in zip(shapes, input_strides(call.tensors), strict=True)
    ]
    first, second = _errors_on_trial(call, shapes, _dtypes(call), its) or (None, None)
    return first if type(first) is type(second) and str(first) == str(second) else None


def _shapes(call: DTensorCall) -> list[Ints]:
    return [tuple(tensor.shape) for tensor in call.tensors]


def _dtypes(call: DTensorCall) -> list[torch.dtype]:
    return [tensor.dtype for tensor in call.tensors]


def empty_parts_refusal(
    call: DTensorCall, specs: Sequence[DTensorSpec], runs_on_locals: bool
) -> Exception | None:
    """The error that only ranks with elements would raise; None if no rank would raise. Local.

    The call needs the layouts ``specs``, and perhaps runs on local tensors, with the other
    arguments.
    """
    dtypes = _dtypes(call)
    if all(0 in spec.shape for spec in specs):  # kernels check no other dim of an empty batch
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
    # A call that torch refuses with other dtypes, too, is refused for the trial's elements.
    rest = len(dtypes) - 1
    for others in (torch.float64, torch.int64):
        if _trial_refusal(call, shapes, [torch.float64, *[others] * rest]) is None:
            return refusal
    return None


def _shapes_with_elements(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The local shapes on the first rank that has a part of every dim with elements."""
    for coordinate in product(*map(range, specs[0].mesh.spec.shape)):
        shapes = [spec.sizes_at(coordinate) for spec in specs]
        if not any(
            size == 0 != full_size
            for shape, spec in zip(shapes, specs, strict=True)
            for size, full_size in zip(shape, spec.shape, strict=True)
        ):
            return shapes
    return None


def _small_shapes(specs: Sequence[DTensorSpec]) -> list[Ints] | None:
    """The shapes of the full tensors; None if a tensor is large."""
    shapes = [spec.shape for spec in specs]
    return None if any(prod(shape) > _MOST_TRIED for shape in shapes) else shapes


def _trial_refusal(
    call: DTensorCall, shapes: Sequence[Ints], dtypes: Sequence[torch.dtype]
) -> Exception | None:
    """The error for tensors of these shapes and dtypes with any elements; None if there is none."""
    errors = _errors_on_trial(call, shapes, dtypes)
    return None if errors is None else errors[1]


def _errors_on_trial(
    call: DTensorCall,
    shapes: Sequence[Ints],
    dtypes: Sequence[torch.dtype],
    its_strides: Sequence[Ints] | None = None,
) -> tuple[Exception, Exception] | None:
    """The errors for zeros and ones, if identity matrices fail, too; None: accepted."""
    errors: list[Exception] = []
    for value in (0, 1, _IDENTITY):
        error = _error_on_trial(call, shapes, dtypes, value, its_strides)
        if error is None:
            return None
        errors.append(error)
    return errors[0], errors[1]


def _error_on_trial(
    call: DTensorCall,
    shapes: Sequence[Ints],
    dtypes: Sequence[torch.dtype],
    value: int | None,
    its_strides: Sequence[Ints] | None = None,
) -> Exception | None:
    """The error for tensors of one value; only torch's own operators are tried."""
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
    """A tensor full of ``value`` in another shape, strides and dtype; or identity matrices."""
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
