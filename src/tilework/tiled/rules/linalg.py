"""Linear algebra and Fourier transforms: matrices and transformed dims are unshardable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Factor, factors_of
from tilework.tiled.op_rules import Arg, RuleResult, local_call, match_pattern
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import allow_empty_shards


def _register_batched(names: str, text: str) -> None:
    def answer(*args: Any, **kwargs: Any) -> RuleResult:
        return match_pattern(
            text, [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Arg)]
        )

    rule(*names.split())(answer)


_register_batched("logdet", "b* m! n! -> b*")
_register_batched("linalg_matrix_rank", "b* m! n!, b*?, b*? -> b*")
_register_batched("slogdet linalg_slogdet", "b* m! n! -> b*, b*")
_register_batched(
    "inverse linalg_inv cholesky linalg_cholesky cholesky_inverse"
    " matrix_exp linalg_matrix_exp matrix_power linalg_matrix_power",
    "b* m! n! -> b* m! n!",
)
_register_batched("pinverse linalg_pinv", "b* m! n!, b*?, b*? -> b* n! m!")
_register_batched("linalg_inv_ex linalg_cholesky_ex", "b* m! n! -> b* m! n!, b*")
_register_batched("linalg_svdvals linalg_eigvals linalg_eigvalsh", "b* m! n! -> b* n!")
_register_batched("linalg_eig linalg_eigh", "b* m! n! -> b* n!, b* m! n!")
_register_batched("svd linalg_svd", "b* m! n! -> b* m! m!, b* n!, b* n! n!")
_register_batched("linalg_lu", "b* m! n! -> b* m! m!, b* m! n!, b* m! n!")
_register_batched("linalg_lu_factor linalg_ldl_factor", "b* m! n! -> b* m! n!, b* n!")
_register_batched(
    "linalg_lu_factor_ex linalg_ldl_factor_ex _lu_with_info", "b* m! n! -> b* m! n!, b* n!, b*"
)
_register_batched("cholesky_solve", "b* n! k, b* n! n! -> b* n! k")
_register_batched("triangular_solve", "b* n! k!, b* n! n! -> b* n! k!, b* n! n!")
_register_batched("lu_solve", "b* n! k, b* n! n!, b* n! -> b* n! k")
_register_batched("linalg_ldl_solve", "b* n! n!, b* n!, b* n! k -> b* n! k")
_register_batched("cdist", "b* p m!, b* r m! -> b* p r")


@rule("det", "linalg_det")
def _det(input: Any) -> RuleResult:
    return match_pattern("b* m! n! -> b*", [input], run=allow_empty_shards(torch.linalg.det))


@rule("linalg_cond")
def _cond(A: Any, p: Any = None) -> RuleResult:
    return match_pattern(
        "b* m! n! -> b*", [A], run=allow_empty_shards(partial(torch.linalg.cond, p=p))
    )


@rule("linalg_householder_product", "orgqr")
def _householder_product(input: Any, tau: Any) -> RuleResult:
    run = allow_empty_shards(torch.linalg.householder_product)
    return match_pattern("b* m! n!, b* k! -> b* m! n!", [input, tau], run=run)


@rule("qr", "linalg_qr")
def _qr(A: Any, mode: Any = "reduced") -> RuleResult:
    if mode == "r":  # the first result is empty
        return match_pattern("b* m! n! -> n!, b* m! n!", [A])
    return match_pattern("b* m! n! -> b* m! n!, b* n! n!", [A])


@rule("lu")
def _lu(A: Any, pivot: bool = True, get_infos: bool = False) -> RuleResult:
    return match_pattern("b* m! n! -> b* m! n!, b* n!" + ", b*" * get_infos, [A])


@rule("linalg_solve")
def _solve(A: Any, B: Any, *, left: bool = True) -> RuleResult:
    return _solution(torch.linalg.solve, A, B, left, "k", "")


@rule("linalg_solve_ex")
def _solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> RuleResult:
    solve = partial(torch.linalg.solve_ex, check_errors=check_errors)
    return _solution(solve, A, B, left, "k!", ", b*")


def _solution(
    function: Callable[..., Any], A: Arg, B: Any, left: bool, columns: str, more: str
) -> RuleResult:
    if B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1]):
        return match_pattern(f"b* n! n!, b* n! -> b* n!{more}", [A, B])
    shown = f"b* n! {columns}" if left else f"b* {columns} n!"
    missing = A.ndim - B.ndim

    def run(A: Tensor, B: Tensor) -> Any:
        """Solve with dims added to B: torch then reads B as a matrix, not as vectors."""
        return function(A, B[(None,) * missing], left=left)

    return match_pattern(
        f"b* n! n!, {shown} -> {shown}{more}",
        [A, B],
        run=None if missing <= 0 else lambda ranges: run,
    )


@rule("linalg_solve_triangular")
def _solve_triangular(
    A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> RuleResult:
    shown = "b* n! k" if left else "b* k n!"
    return match_pattern(f"b* n! n!, {shown} -> {shown}", [A, B])


@rule("linalg_lu_solve")
def _lu_solve(
    LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False
) -> RuleResult:
    shown = "b* n! k" if left else "b* k n!"
    return match_pattern(f"b* n! n!, b* n!, {shown} -> {shown}", [LU, pivots, B])


@rule("ormqr")
def _ormqr(
    input: Any, tau: Any, input2: Any, left: bool = True, transpose: bool = False
) -> RuleResult:
    shown = "b* m! c" if left else "b* c m!"
    run = allow_empty_shards(partial(torch.ormqr, left=left, transpose=transpose), like=2)
    return match_pattern(
        f"b* m! n!, b* k!, {shown} -> {shown}", [input, tau, input2], linear=[[input2]], run=run
    )


@rule("lu_unpack")
def _lu_unpack(
    LU_data: Any, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> RuleResult:
    matrix = "b* m! n!"
    data, pivots = matrix if unpack_data else "n!", "b* m! m!" if unpack_pivots else "n!"
    return match_pattern(f"{matrix}, b* k! -> {pivots}, {data}, {data}", [LU_data, LU_pivots])


@rule("linalg_vander")
def _vander(x: Any, *, N: int | None = None) -> RuleResult:
    count = x.shape[-1] if N is None else N
    dims, powers = factors_of(x.shape), Factor(count, "powers", unshardable=True)
    return local_call(
        {x: dims}, [[*dims, powers]], run=lambda ranges: partial(torch.linalg.vander, N=count)
    )


_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _as_list(given: Any) -> Sequence[int]:
    return [given] if isinstance(given, int) else given


def _transform(input: Arg, dims: Sequence[int], function: Callable[[Tensor], Tensor]) -> RuleResult:
    factors = factors_of(input.shape)
    for dim in dims:
        factors[dim].unshardable = True
    run = allow_empty_shards(function)
    return local_call({input: factors}, [factors], linear=[[input]], run=run)


def _register(kind: str) -> None:
    along_one, along_two, along_many = (getattr(torch.fft, kind + dims) for dims in ("", "2", "n"))

    @rule(f"fft_{kind}")
    def _along_one(input: Any, n: Any = None, dim: int = -1, norm: str | None = None) -> RuleResult:
        return _transform(input, [dim], partial(along_one, n=n, dim=dim, norm=norm))

    @rule(f"fft_{kind}2")
    def _along_two(
        input: Any, s: Any = None, dim: Any = (-2, -1), norm: str | None = None
    ) -> RuleResult:
        return _transform(input, _as_list(dim), partial(along_two, s=s, dim=dim, norm=norm))

    @rule(f"fft_{kind}n")
    def _along_many(
        input: Any, s: Any = None, dim: Any = None, norm: str | None = None
    ) -> RuleResult:
        last = range(-(input.ndim if s is None else len(_as_list(s))), 0)
        dims = last if dim is None else _as_list(dim)
        return _transform(input, dims, partial(along_many, s=s, dim=dim, norm=norm))


for _kind in _KINDS:
    _register(_kind)


@rule("fft_fftshift", "fft_ifftshift")
def _shift(input: Any, dim: Any = None) -> RuleResult:
    factors = factors_of(input.shape)
    for at in range(input.ndim) if dim is None else _as_list(dim):
        factors[at].unshardable = True
    return local_call({input: factors}, [factors], rearranges=True)


@rule("stft")
def _stft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    *args: Any,
    return_complex: bool | None = None,
    **kwargs: Any,
) -> RuleResult:
    tensors = [arg for arg in (input, window) if isinstance(arg, Arg)]
    is_complex = return_complex or any(arg.dtype.is_complex for arg in tensors)
    if return_complex is None and not is_complex:
        return None  # torch raises where it is run
    *batch, samples = factors_of(input.shape)
    samples.unshardable = True
    inputs: dict[Arg, Sequence[Factor | None]] = {input: [*batch, samples]}
    if isinstance(window, Arg):
        inputs[window] = [None]
    kwargs |= {"hop_length": hop_length, "win_length": win_length, "return_complex": return_complex}
    pairs = [] if is_complex else [None]  # real and imaginary parts in a separate dim

    def function(input: Tensor, window: Tensor | None = None) -> Tensor:
        return torch.stft(input, n_fft, window=window, **kwargs)

    run = None if args else allow_empty_shards(function)
    return local_call(inputs, [[*batch, None, None, *pairs]], linear=[[input]], run=run)


@rule("istft")
def _istft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> RuleResult:
    *batch, _, frames = input.shape
    factors = factors_of(batch)
    inputs: dict[Arg, Sequence[Factor | None]] = {input: [*factors, None, None]}
    if isinstance(window, Arg):
        inputs[window] = [None]
    hop = n_fft // 4 if hop_length is None else hop_length
    length_padded = n_fft + hop * (frames - 1)
    samples = (
        (length_padded - 2 * (n_fft // 2) if center else length_padded)
        if length is None
        else length
    )

    def function(input: Tensor, window: Tensor | None = None) -> Tensor:
        return torch.istft(
            input, n_fft, hop_length, win_length, window, center, normalized, onesided, length
        )

    run = None if return_complex else allow_empty_shards(function)
    shapes = [(*batch, samples)]
    return local_call(inputs, [[*factors, None]], linear=[[input]], run=run, shapes=shapes)
