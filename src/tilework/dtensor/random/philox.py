"""Random numbers that do not depend on the layout.

An element's value is a function of a key and of the element's row-major index in the global tensor.
A drawn shard therefore has the same values as that region of the full tensor. The core draws on the
CPU; without the core, and on other devices, ``philox_reference`` gives the same bits. See
docs/algorithms/random.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilework.comm.per_call.internal import recorded
from tilework.dtensor.random import philox_reference
from tilework.optional_core import core as _core

#: The dtypes that can be filled, with the core's names.
_DTYPES = {
    getattr(torch, name): name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
    )
}


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a draw, two integers modulo 2**64; independent draws need different keys."""

    seed: int
    stream: int


@dataclass(frozen=True, slots=True)
class Uniform:
    """Real numbers from [low, high), both as the tensor's dtype rounds them.

    A number has 24 random bits, for float64 53. 16-bit numbers are drawn as float32 and rounded to
    nearest. For complex numbers, the real and the imaginary part are such numbers.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"uniform needs finite low <= high, got {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Normal:
    """Normally distributed numbers; up to 6.3 deviations away, 8.4 for float64.

    For complex numbers, both parts have std / sqrt(2), and the mean is added to the real part.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"normal needs std >= 0, got {self.std}")


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers from [low, high).

    A value's probability is off by at most one part in 2**16. For more than 2**16 values, it is off
    by at most one part in 2**64 / (high - low).
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 < self.high - self.low <= 1 << 64:
            raise ValueError(
                f"integers needs low < high, at most 2**64 apart, got {self.low} and {self.high}"
            )


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """``value`` with probability ``keep`` (to 2**-32), else 0; for dropout, value is 1 / keep."""

    keep: float
    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ValueError(f"bernoulli needs a probability in [0, 1], got {self.keep}")


Distribution = Uniform | Normal | Integers | Bernoulli


def fill(
    tensor: Tensor,
    key: Key,
    distribution: Distribution,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> Tensor:
    """Draw the part of a random global tensor that begins at ``offsets``, into ``tensor``.

    Not collective, and autograd does not see it. If ``tensor`` is row-major and the distribution
    draws the dtype directly, nothing is allocated; otherwise a temporary tensor of equally many
    elements. A tensor on the meta device is left as it is.

    Args:
        tensor: A tensor of the part's shape, with any strides.
        key: The key that the values depend on.
        distribution: The distribution. Integers and bernoulli fit every real dtype, and bernoulli
            complex dtypes too; uniform and normal fit floating point and complex dtypes.
        shape: The global tensor's shape; by default, ``tensor`` is the global tensor.
        offsets: The index in each dim at which the part begins; by default 0.

    Returns:
        ``tensor``.

    Raises:
        TypeError: The dtype has no such numbers.
        ValueError: The part does not lie in the global tensor, or a bound not in the dtype.

    Example:
        >>> whole = fill(torch.empty(6, 4), Key(seed=0, stream=1), Normal())
        >>> part = fill(torch.empty(2, 3), Key(0, 1), Normal(), whole.shape, offsets=(3, 1))
        >>> torch.equal(part, whole[3:5, 1:4])
        True
    """
    recipe = _recipe(distribution, tensor.dtype)
    if shape is None and offsets is None:
        shape, offsets = tensor.shape, (0,) * tensor.ndim
    else:
        shape = tuple(tensor.shape if shape is None else shape)
        offsets = (0,) * len(shape) if offsets is None else tuple(offsets)
        _check_place(tensor, shape, offsets)
    if not tensor.is_meta:
        _write(tensor, key, recipe, shape, offsets)
    return tensor


def _check_place(tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    fits = len(shape) == len(offsets) == tensor.ndim and all(
        0 <= offset <= offset + size <= extent
        for offset, size, extent in zip(offsets, tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a part of shape {tuple(tensor.shape)} at offsets {offsets} does not lie in a global "
            f"tensor of shape {shape}"
        )
    if math.prod(shape) >= 1 << 63:
        raise ValueError(f"a global tensor has fewer than 2**63 elements, got shape {shape}")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A distribution for a dtype: the core's name and arguments, and a step to do afterwards."""

    name: str
    a: float
    """The lower bound, the mean, or the probability of a success."""
    b: float
    """The upper bound, the standard deviation, or the value of a success."""
    dtype: torch.dtype
    """The dtype that is drawn: for a complex dtype, the dtype of the parts."""
    complex_mean: float | None = None
    """The mean that is added afterwards to complex numbers, whose parts are drawn; else None."""


@lru_cache(maxsize=1024)
def _recipe(distribution: Distribution, dtype: torch.dtype) -> _Recipe:
    _check_dtype(distribution, dtype)
    match distribution:
        case Uniform(low, high):
            _check_uniform(low, high, dtype)
            return _Recipe("uniform", low, high, dtype.to_real(), 0 if dtype.is_complex else None)
        case Normal(mean, std) if dtype.is_complex:
            return _Recipe("normal", 0.0, std / math.sqrt(2), dtype.to_real(), mean)
        case Normal(mean, std):
            return _Recipe("normal", mean, std, dtype)
        case Integers(low, high):
            _check_integers(low, high, dtype)
            drawn = torch.int64 if dtype.is_floating_point else dtype
            return _Recipe("integers", low, high, drawn)
        case Bernoulli(keep, value):
            itself = dtype.is_floating_point or dtype == torch.bool
            return _Recipe("bernoulli", keep, value, dtype if itself else torch.float64)


def _check_dtype(distribution: Distribution, dtype: torch.dtype) -> None:
    real = dtype.is_floating_point or dtype.is_complex
    lacks = dtype not in _DTYPES or (isinstance(distribution, Uniform | Normal) and not real)
    if lacks or (isinstance(distribution, Integers) and dtype.is_complex):
        raise TypeError(f"{dtype} has no random numbers like {distribution}")


def _check_uniform(low: float, high: float, dtype: torch.dtype) -> None:
    if max(-low, high, high - low) > torch.finfo(dtype).max:
        raise ValueError(f"uniform numbers from [{low}, {high}) span more than {dtype} has")


def _check_integers(low: int, high: int, dtype: torch.dtype) -> None:
    least, most = _integer_range(dtype)
    if low < least or high - 1 > most:
        raise ValueError(
            f"integers from [{low}, {high}) do not fit {dtype}, which has those from {least} to "
            f"{most}"
        )


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:  # integers up to this bound are exact
        digits = 1 - round(math.log2(torch.finfo(dtype).eps))
        return -(1 << digits), 1 << digits
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _write(
    tensor: Tensor, key: Key, recipe: _Recipe, shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Draw in place, or to a temporary tensor that is then copied."""
    in_place = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    if in_place and recipe.dtype == tensor.dtype:
        _draw(tensor, key, recipe, shape, offsets)
    elif in_place and recipe.complex_mean is not None:
        target = tensor.detach()
        _draw(torch.view_as_real(target), key, recipe, (*shape, 2), (*offsets, 0))
        if recipe.complex_mean:
            target.add_(recipe.complex_mean)
    else:
        dtype = recipe.dtype if recipe.complex_mean is None else tensor.dtype
        temporary = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        _write(temporary, key, recipe, shape, offsets)
        tensor.detach().copy_(temporary)


@recorded
def _draw(
    tensor: Tensor, key: Key, recipe: _Recipe, shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Draw to row-major memory of the recipe's dtype."""
    place = shape, offsets
    # The core cannot write to the memory of subclasses, or of tensors on other devices.
    if _core is None or not tensor.is_cpu or type(tensor) not in (Tensor, torch.nn.Parameter):
        philox_reference.fill_random(
            tensor.detach(), recipe.name, key.seed, key.stream, *place, recipe.a, recipe.b
        )
        return
    _core.fill_random(
        tensor.data_ptr(),
        _core.DTYPES[_DTYPES[recipe.dtype]],
        _core.DISTRIBUTIONS[recipe.name],
        key.seed,
        key.stream,
        shape,
        offsets,
        tensor.shape,
        recipe.a,
        recipe.b,
    )
    if not tensor.is_inference():  # inference tensors have no version
        increment_version(tensor)
