"""The core's random numbers in plain torch: the same bits, on any device, many times slower.

For devices and installations without the core. csrc/kernels/random.h and random_kernels.cpp must
give the same bits. Words of 32 bits are int64 tensors here, and no product overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GROUP, _BLOCKS = 64, 16
#: The elements drawn at a time: each needs a hundred bytes of temporary memory.
_PIECE = 1 << 18
_NARROW_SPAN = 1 << 16

Words = tuple[Tensor, Tensor]
"""64 bits: the upper and the lower word."""


def fill_random(  # noqa: PLR0913
    target: Tensor,
    distribution: str,
    seed: int,
    stream: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    a: float,
    b: float,
) -> None:
    """Fill a row-major tensor, as the core's function of this name does."""
    flat = target.view(-1)
    for begin in range(0, len(flat), _PIECE):
        end = min(begin + _PIECE, len(flat))
        indices = _indices(begin, end, shape, offsets, target)
        bits = Bits(indices, seed, stream)
        flat[begin:end] = _DISTRIBUTIONS[distribution](bits, a, b, target.dtype)


def _indices(
    begin: int, end: int, shape: Sequence[int], offsets: Sequence[int], target: Tensor
) -> Tensor:
    """The global row-major indices of the part's elements from ``begin`` to ``end``."""
    rest = torch.arange(begin, end, device=target.device)
    indices = torch.zeros_like(rest)
    stride = 1
    for size, extent, offset in reversed(list(zip(target.shape, shape, offsets, strict=True))):
        indices += (rest % size + offset) * stride
        rest //= size
        stride *= extent
    return indices


class Bits:
    """The random bits of elements, by their global indices."""

    def __init__(self, indices: Tensor, seed: int, stream: int) -> None:
        self._group, self._within = indices // _GROUP, indices % _GROUP
        self._key = seed & _WORD, seed >> 32 & _WORD
        self._stream = stream & _WORD, stream >> 32 & _WORD

    def narrow(self) -> Tensor:
        """32 bits for each element."""
        return self._word(self._group * _BLOCKS)

    def wide(self) -> Words:
        """64 bits for each element."""
        first = self._group * (2 * _BLOCKS)
        return self._word(first + _BLOCKS), self._word(first)

    def _word(self, first: Tensor) -> Tensor:
        block = first + self._within % _BLOCKS
        stream = [torch.full_like(block, word) for word in self._stream]
        words = philox4x32((block & _WORD, block >> 32, stream[0], stream[1]), self._key)
        return torch.stack(words).gather(0, (self._within // _BLOCKS)[None])[0]


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of each counter: four words from four words (Salmon et al. 2011)."""
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(10):
        high0, low0 = _product(x0, 0xD2511F53)
        high2, low2 = _product(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high2 ^ x1 ^ key0, low2, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return x0, x1, x2, x3


def _product(x: Tensor, factor: int) -> Words:
    """The product of words with a factor, without overflow."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD


def _uniform(bits: Bits, low: float, high: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        upper, lower = bits.wide()
        fraction = ((upper << 21) + (lower >> 11)).to(dtype) * 2.0**-53
    else:
        fraction = (bits.narrow() >> 8).to(torch.float32) * 2.0**-24
    first = _constant(low, fraction)
    values = first + fraction * _constant(high - low, fraction)
    # Sums may round to the upper bound.
    bound = torch.tensor(high, dtype=dtype, device=values.device)
    last = torch.nextafter(bound, torch.full_like(bound, -torch.inf)).to(values.dtype)
    return torch.minimum(values, torch.maximum(last, first)).to(dtype)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _normal(bits: Bits, mean: float, deviation: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        upper, lower = bits.wide()
        t = ((((upper & 0x7FFFFFFF) << 22) + (lower >> 10)).to(dtype) + 0.5) * 2.0**-53
        size = _inverse_erf_over64(-_logarithm64(t * (2 - t)))
    else:
        upper = bits.narrow()
        t = ((upper & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
        size = _inverse_erf_over32(-_logarithm32(t * (2 - t)))
    size = size * (1 - t) * 1.4142135623730951
    values = torch.where(upper >> 31 == 0, size, -size)
    return (_constant(mean, t) + _constant(deviation, t) * values).to(dtype)


def _polynomial(x: Tensor, first: float, *rest: float) -> Tensor:
    """The value of a polynomial; the coefficient of the highest power comes first."""
    value = torch.full_like(x, first)
    for coefficient in rest:
        value = value * x + coefficient
    return value


def _logarithm32(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    e = exponent.to(torch.float32)
    f = (bits - (exponent << 23)).view(torch.float32) - 1
    z = f * f
    p = _polynomial(f, *_LOGARITHM32)
    tail = p * f * z + e * -2.12194440e-4 - 0.5 * z
    return (f + tail) + e * 0.693359375


def _logarithm64(x: Tensor) -> Tensor:
    bits = x.view(torch.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    e = exponent.to(torch.float64)
    f = (bits - (exponent << 52)).view(torch.float64) - 1
    s, half = f / (2 + f), 0.5 * f * f
    z = s * s
    r = _polynomial(z, *_LOGARITHM64) * z
    tail = (half - (s * (half + r) + e * 1.90821492927058770002e-10)) - f
    return e * 6.93147180369123816490e-01 - tail


def _inverse_erf_over32(w: Tensor) -> Tensor:
    values = _polynomial(w - 2.5, *_CENTRE32)
    tail = w >= 5
    values[tail] = _polynomial(_root(w[tail]) - 3, *_TAIL32)
    return values


def _inverse_erf_over64(w: Tensor) -> Tensor:
    values = _polynomial(w - 3.125, *_CENTRE64)
    middle, end = (w >= 6.25) & (w < 16), w >= 16
    values[middle] = _polynomial(_root(w[middle]) - 3.25, *_MIDDLE64)
    values[end] = _polynomial(_root(w[end]) - 5, *_END64)
    return values


def _root(x: Tensor) -> Tensor:
    """Square roots of few numbers, correctly rounded. torch does not guarantee that."""
    roots = [math.sqrt(value) for value in x.tolist()]
    return torch.tensor(roots, dtype=torch.float64, device=x.device).to(x.dtype)


def _integers(bits: Bits, low: float, high: float, dtype: torch.dtype) -> Tensor:
    first, span = int(low), int(high) - int(low)
    if span <= _NARROW_SPAN:
        lower = (bits.narrow() * span) >> 32
        words = torch.zeros_like(lower), lower
    else:
        words = bits.wide() if span == 1 << 64 else _upper_product(bits.wide(), span)
    upper, lower = _sum(words, first)
    signed = torch.where(upper >> 31 == 0, upper, upper - (1 << 32)) * (1 << 32) + lower
    return signed.view(dtype) if dtype == torch.uint64 else signed.to(dtype)


def _upper_product(x: Words, factor: int) -> Words:
    """The upper half of the product of 64-bit numbers."""
    outer_high, outer_low = _product(x[0], factor >> 32)
    one_high, one_low = _product(x[0], factor & _WORD)
    other_high, other_low = _product(x[1], factor >> 32)
    carry = (_product(x[1], factor & _WORD)[0] + one_low + other_low) >> 32
    low = outer_low + one_high + other_high + carry
    return outer_high + (low >> 32), low & _WORD


def _sum(x: Words, number: int) -> Words:
    """The sum modulo 2**64."""
    low = x[1] + (number & _WORD)
    return (x[0] + (number >> 32 & _WORD) + (low >> 32)) & _WORD, low & _WORD


def _bernoulli(bits: Bits, keep: float, value: float, dtype: torch.dtype) -> Tensor:
    success = bits.narrow() < int(keep * 2.0**32 + 0.5)
    return torch.where(success, torch.tensor(value, dtype=dtype, device=success.device), 0)


_DISTRIBUTIONS = {
    "uniform": _uniform,
    "normal": _normal,
    "integers": _integers,
    "bernoulli": _bernoulli,
}

# From Cephes (S. Moshier) and fdlibm (Sun); the rest, Giles 2010.
_LOGARITHM32 = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LOGARITHM64 = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
    2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
    6.666666666666735130e-01,
)  # fmt: skip
_CENTRE32 = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL32 = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip
_CENTRE64 = (
    -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18,
    1.115787767802518096e-17, -1.333171662854620906e-16, 2.0972767875968561637e-17,
    6.6376381343583238325e-15, -4.0545662729752068639e-14, -8.1519341976054721522e-14,
    2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
    1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08,
    4.2347877827932403518e-07, -1.3654692000834678645e-06, -1.3882523362786468719e-05,
    0.0001867342080340571352, -0.00074070253416626697512, -0.0060336708714301490533,
    0.24015818242558961693, 1.6536545626831027356,
)  # fmt: skip
_MIDDLE64 = (
    2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07,
    1.8239629214389227755e-08, 1.5027403968909827627e-06, -4.013867526981545969e-06,
    2.9234449089955446044e-06, 1.2475304481671778723e-05, -4.7318229009055733981e-05,
    6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
    0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066,
    -0.0037512085075692412107, 0.005370914553590063617, 1.0052589676941592334,
    3.0838856104922207635,
)  # fmt: skip
_END64 = (
    -2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09,
    -3.7894654401267369937e-09, 7.6157012080783393804e-09, -1.4960026627149240478e-08,
    2.9147953450901080826e-08, -6.7711997758452339498e-08, 2.2900482228026654717e-07,
    -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
    7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026,
    1.0103004648645343977, 4.8499064014085844221,
)  # fmt: skip
