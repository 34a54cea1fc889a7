"""Fourier transforms: the transformed dims are unshardable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Factor, factors_of
from tilework.tiled.op_rules import Arg, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.empty_shards import allow_empty_shards

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _as_list(given: Any) -> Sequence[int]:
    return [given] if isinstance(given, int) else given


def _transform(input: Arg, dims: Sequence[int], function: Callable[[Tensor], Tensor]) -> RuleResult:
    """The rule of a Fourier transform, which needs ``dims`` unsharded."""
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
    kwargs |= {
        "hop_length": hop_length,
        "win_length": win_length,
        "return_complex": return_complex,
    }
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
