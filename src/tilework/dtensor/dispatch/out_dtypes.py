"""Dtypes of ``out=``: which operators cast their result to it, and which take its own only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilework.tiled.op_table import entry_of

#: Elementwise operators whose result is not cast; all others' are.
_EXACT_ELEMENTWISE = frozenset(
    {
        *("bitwise_not", "ceil", "complex", "conj_physical", "float_power", "floor", "frac"),
        *("frexp", "gelu", "hardshrink", "heaviside", "isneginf", "isposinf", "log_sigmoid"),
        *("nan_to_num", "neg", "negative", "polar", "round", "sgn", "sign", "signbit", "softplus"),
        *("softshrink", "trunc", "fix", "where"),
    }
)
#: Other operators whose result is cast; all others' are not.
_CAST = frozenset(
    {
        *("_chunk_cat", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"),
        *("column_stack", "row_stack"),
        *("addr", "ger", "kron", "normal", "normalize", "outer", "polygamma", "special_polygamma"),
        *("mean", "std", "var", "sum", "prod", "cumprod", "cumsum", "logsumexp"),
        "special_logsumexp",
        *("cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "lu"),
        *("fft_fft", "fft_fft2", "fft_fftn", "fft_ifft2", "fft_ifftn", "fft_ihfft2"),
        *("fft_ihfftn", "fft_rfft", "fft_rfft2", "fft_rfftn"),
        *("linalg_cond", "linalg_eig", "linalg_eigvals", "linalg_householder_product"),
        *("linalg_lstsq", "linalg_matrix_power", "linalg_matrix_rank", "linalg_pinv"),
        *("linalg_tensorinv", "linalg_tensorsolve"),
    }
)
#: Those whose result is cast, but no real one to complex numbers.
_CAST_TO_REAL = frozenset(
    {
        *("abs", "absolute", "nanmean", "nansum", "bernoulli"),
        *("fft_hfft", "fft_hfft2", "fft_hfftn", "fft_irfft", "fft_irfft2", "fft_irfftn"),
    }
)


def _whole_extremum(result: Any) -> bool:
    return not isinstance(result, tuple)  # else with places


#: Those whose result is cast in some of their forms.
_CAST_IN_FORMS: dict[str, Callable[[Any], bool]] = {"max": _whole_extremum, "min": _whole_extremum}


def check_out_dtype(name: str, result: Any, value: torch.dtype, out: torch.dtype) -> None:
    """Raise RuntimeError, as torch does, if ``out=`` cannot take a result. Local.

    Args:
        name: The operator.
        result: All that it gives.
        value: The dtype of the result that goes there.
        out: The dtype that is there.
    """
    if value == out:
        return
    if not torch.can_cast(value, out):
        raise RuntimeError(
            f"result type {value} of {name} can't be cast to the desired output type {out}"
        )
    if not _casts(name, result, value, out):
        raise RuntimeError(
            f"{name} casts no result: expected out= of dtype {value}, got {out}: pass one of that "
            f"dtype, or cast what {name} gives without out="
        )


def _casts(name: str, result: Any, value: torch.dtype, out: torch.dtype) -> bool:
    """True if an operator's result is cast where the dtypes allow it."""
    if name in ("all", "any"):
        return out is torch.uint8
    if name in _CAST_TO_REAL:
        return value.is_complex or not out.is_complex
    if name in _CAST_IN_FORMS:
        return _CAST_IN_FORMS[name](result)
    if name in _EXACT_ELEMENTWISE:
        return False
    return name in _CAST or entry_of(name).is_elementwise
