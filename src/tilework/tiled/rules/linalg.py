"""Linear algebra: matrices are unshardable, batches and right-hand sides are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Factor, factors_of
from tilework.tiled.op_rules import Arg, RuleResult, local_call, match_pattern
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import allow_empty_shards


def _register_batched(names: str, text: str) -> None:
    """Register operators by a pattern of arguments; torch gives the results' sizes."""

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
