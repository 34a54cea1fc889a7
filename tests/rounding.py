"""Comparison of floating-point results that were summed in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances


def assert_close(
    found: Any,
    wanted: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    check_dtype: bool = True,
    equal_nan: bool = False,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """``torch.testing.assert_close``, but allowing a small element the error of a large one.

    The rounding error of a sum grows with its terms, not with its result (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd edition, section 4.2), and the order of summation differs
    between machines. An element may therefore be off by ``rtol`` times the largest finite magnitude
    in ``wanted``.

    Args:
        found: A tensor, or a number.
        wanted: What it is to be.
        rtol: Relative error; by default that of ``torch.testing`` for the dtype.
        atol: Absolute error; by default likewise. The relative one of the largest element is
            allowed, too, unless both are given as 0.
        check_dtype: As for ``torch.testing.assert_close``.
        equal_nan: Likewise.
        msg: Likewise.

    Raises:
        AssertionError: They differ by more.
    """
    if _equal(found, wanted):  # one operator, where a comparison with tolerances takes many
        return
    rounds = isinstance(wanted, Tensor) and (wanted.is_floating_point() or wanted.is_complex())
    if rounds and (rtol, atol) != (0, 0):
        relative, absolute = default_tolerances(found, wanted)
        rtol = relative if rtol is None else rtol
        atol = absolute if atol is None else atol
        magnitudes = wanted.detach().abs().double().flatten()
        finite = magnitudes[magnitudes.isfinite()]
        largest = float(finite.max()) if len(finite) else 0.0
        atol = max(atol, rtol * largest)
    torch.testing.assert_close(
        found,
        wanted,
        rtol=rtol,
        atol=atol,
        check_dtype=check_dtype,
        equal_nan=equal_nan,
        msg=msg,
    )


def _equal(found: object, wanted: object) -> bool:
    """True for plain tensors of a usual dtype that have the same elements, none of them NaN."""
    return (
        type(found) is Tensor
        and type(wanted) is Tensor
        and found.dtype == wanted.dtype
        and found.dtype in (torch.float32, torch.float64, torch.bfloat16)
        and found.layout == wanted.layout == torch.strided
        and found.device == wanted.device
        and torch.equal(found, wanted)
    )
