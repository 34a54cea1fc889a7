"""Decompositions, solvers and Fourier transforms on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dtensor.op_checks import check_op, count_op
from tests.tables import each
from tilework.layout import Replicate, Shard

L = torch.linalg


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def square(*batch: int) -> Tensor:
    return drawn(*batch, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)


def positive(*batch: int) -> Tensor:
    x = square(*batch)
    return x @ x.mT


TALL, SQUARE, POSITIVE = drawn(3, 5, 2), square(4), positive(4)
FACTORED, PIVOTS = L.lu_factor(SQUARE)
LDL, LDL_PIVOTS = L.ldl_factor(POSITIVE)
RIGHT = drawn(4, 3, 2)
SIGNAL = drawn(3, 4, 6)

CALLS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "det": (torch.det, [SQUARE]),
    "slogdet": (L.slogdet, [square(2, 2)]),
    "logdet": (torch.logdet, [POSITIVE]),
    "inv": (L.inv, [SQUARE]),
    "inv_ex": (L.inv_ex, [SQUARE]),
    "cholesky": (L.cholesky, [POSITIVE]),
    "cholesky_ex": (L.cholesky_ex, [POSITIVE]),
    "cholesky_inverse": (torch.cholesky_inverse, [POSITIVE]),
    "cholesky_solve": (torch.cholesky_solve, [RIGHT, POSITIVE]),
    "qr": (L.qr, [TALL]),
    "qr of r": (lambda x: L.qr(x, mode="r"), [TALL]),
    "svdvals": (L.svdvals, [TALL]),
    "svd": (lambda x: L.svd(x, full_matrices=False), [TALL]),
    "full svd": (lambda x: L.svd(x)[1], [TALL]),
    "eigh": (lambda x: L.eigh(x)[0], [POSITIVE]),
    "eigvalsh": (L.eigvalsh, [POSITIVE]),
    "eigvals": (L.eigvals, [SQUARE]),
    "eig": (lambda x: L.eig(x)[0], [SQUARE]),
    "matrix_exp": (torch.matrix_exp, [SQUARE]),
    "matrix_power": (lambda x: L.matrix_power(x, 3), [SQUARE]),
    "matrix_rank": (L.matrix_rank, [SQUARE]),
    "pinv": (L.pinv, [TALL]),
    "cond": (L.cond, [SQUARE]),
    "lu": (L.lu, [SQUARE]),
    "lu_factor": (L.lu_factor, [SQUARE]),
    "lu_factor_ex": (L.lu_factor_ex, [SQUARE]),
    "ldl_factor": (lambda x: L.ldl_factor(x.detach()), [POSITIVE]),
    "lu_unpack": (lambda x: torch.lu_unpack(x, PIVOTS), [FACTORED]),
    "lu_unpack of data": (lambda x: torch.lu_unpack(x, PIVOTS, unpack_pivots=False), [FACTORED]),
    "lu_solve": (L.lu_solve, [FACTORED, PIVOTS, RIGHT]),
    "ldl_solve": (lambda a, p, b: L.ldl_solve(a.detach(), p, b.detach()), [LDL, LDL_PIVOTS, RIGHT]),
    "solve": (L.solve, [SQUARE, RIGHT]),
    "solve of vectors": (L.solve, [SQUARE, RIGHT[..., 0]]),
    "solve from the right": (lambda a, b: L.solve(a, b, left=False), [SQUARE, RIGHT.mT]),
    "solve of one matrix": (L.solve, [SQUARE[0], RIGHT]),
    "solve of one matrix, as large as a part": (L.solve, [square(5), drawn(3, 3)]),
    "solve_ex": (L.solve_ex, [SQUARE, RIGHT]),
    "solve_triangular": (lambda a, b: L.solve_triangular(a, b, upper=True), [SQUARE, RIGHT]),
    "householder_product": (L.householder_product, [TALL, drawn(3, 2)]),
    "ormqr": (lambda a, t, b: torch.ormqr(a, t, b), [TALL, drawn(3, 2), drawn(3, 5, 2)]),
    "vander": (lambda x: L.vander(x, N=4), [drawn(3, 2)]),
    "vander of all": (L.vander, [drawn(5)]),
    "fft2 of one dim": (lambda x: torch.fft.fft2(x, dim=1), [SIGNAL]),
    "cdist": (torch.cdist, [drawn(2, 4, 3), drawn(2, 5, 3)]),
    "fft": (torch.fft.fft, [SIGNAL]),
    "fft of more": (lambda x: torch.fft.fft(x, n=9, dim=1), [SIGNAL]),
    "rfft": (lambda x: torch.fft.rfft(x, dim=0), [SIGNAL]),
    "irfft": (torch.fft.irfft, [SIGNAL.to(torch.complex128)]),
    "hfft": (torch.fft.hfft, [SIGNAL.to(torch.complex128)]),
    "fft2": (torch.fft.fft2, [SIGNAL]),
    "rfftn": (lambda x: torch.fft.rfftn(x, dim=(0, 2)), [SIGNAL]),
    "fftn of sizes": (lambda x: torch.fft.fftn(x, s=(4, 4)), [SIGNAL]),
    "fftshift": (lambda x: torch.fft.fftshift(x, dim=1), [SIGNAL]),
    "stft in pairs": (
        lambda x, w: torch.stft(x, 16, window=w, return_complex=False),
        [drawn(2, 64), drawn(16)],
    ),
    "stft of complex values": (
        lambda x, w: torch.stft(torch.complex(x, x), 16, window=w),
        [drawn(2, 64), drawn(16)],
    ),
    "stft": (
        lambda x, w: torch.stft(x, 16, window=w, return_complex=True),
        [drawn(3, 40), torch.hann_window(16, dtype=torch.float64)],
    ),
    "istft": (
        lambda x, w: torch.istft(x, 16, window=w),
        [drawn(3, 9, 11, dtype=torch.complex128), torch.hann_window(16, dtype=torch.float64)],
    ),
}


@pytest.mark.filterwarnings("ignore:stft with return_complex:UserWarning")
@each("name", CALLS)
def test_batches_are_cut(name: str) -> None:
    fn, tensors = CALLS[name]
    check_op(fn, *tensors, meshes=[(2, 2)], most=3, gathers=False)


def test_batches_need_not_communicate() -> None:
    for fn, tensors in (CALLS["inv"], CALLS["solve"], CALLS["fft"], CALLS["eigvalsh"]):
        found = count_op(fn, *tensors, layouts=[[Shard(0)]] * len(tensors))
        assert (found.forward, found.backward) == ([], [])


def test_what_is_solved_may_be_cut_along_columns() -> None:
    found = count_op(L.solve, SQUARE, RIGHT, layouts=[[Replicate()], [Shard(2)]])
    assert found.forward == []
    assert found.placements == [(Shard(2),)]


def test_fewer_columns_than_ranks() -> None:
    matrices = [drawn(3, 2), drawn(2), drawn(3, 2)]
    check_op(torch.ormqr, *matrices, meshes=[(3,)], most=30, gathers=False)
