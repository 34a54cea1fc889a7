"""Counter-based random numbers: the published words, any part, any level, any implementation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.rounding import assert_close
from tilework.dtensor.random import philox, philox_reference
from tilework.dtensor.random.philox import (
    Bernoulli,
    Distribution,
    Integers,
    Key,
    Normal,
    Uniform,
    fill,
)

try:
    from tilework import _core
except ImportError:
    _core = None  # type: ignore[assignment]

needs_core = pytest.mark.skipif(_core is None, reason="the core is not built")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]
Ints = tuple[int, ...]
KEY = Key(seed=2011, stream=4)
#: Beyond 32 bits in the number of a block, and within a group.
FAR = (1 << 45) + 13


def cases() -> Iterator[tuple[torch.dtype, Distribution]]:
    """Each loop of the core, with numbers that use its whole range and with others."""
    for dtype in FLOATS:
        yield from ((dtype, Uniform()), (dtype, Uniform(-3.3, 7.1)), (dtype, Bernoulli(0.9, 1.25)))
        yield from ((dtype, Normal()), (dtype, Normal(1.7, 0.3)))
    for dtype in INTEGERS:
        least, most = integer_range(dtype)
        yield dtype, Integers(least, most + 1)
        yield dtype, Integers(most // 3, most // 2 + 1)
    yield from ((torch.int64, Integers(-5, 70_000)), (torch.int32, Integers(-(1 << 16), 0)))
    yield torch.bool, Bernoulli(0.3)


def integer_range(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def drawn(
    count: int, dtype: torch.dtype, distribution: Distribution, key: Key = KEY, start: int = 0
) -> Tensor:
    """Elements from ``start`` on of a vector that goes on for long."""
    return fill(torch.empty(count, dtype=dtype), key, distribution, (1 << 60,), (start,))


def by_reference(
    count: int, dtype: torch.dtype, distribution: Distribution, start: int = 0
) -> Tensor:
    target = torch.empty(count, dtype=dtype)
    recipe = philox._recipe(distribution, dtype)
    place = ((1 << 60,), (start,))
    what = (recipe.name, KEY.seed, KEY.stream, *place, recipe.a, recipe.b)
    philox_reference.fill_random(target, *what)
    return target


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


# ---- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_words_are_the_published_ones(counter: str, key: str, expected: str) -> None:
    """From Random123's file of known answers."""
    c0, c1, c2, c3 = (torch.tensor([int(word, 16)]) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    words = philox_reference.philox4x32((c0, c1, c2, c3), (k0, k1))
    assert " ".join(f"{word.item():08x}" for word in words) == expected


def test_words_lie_where_the_mapping_says() -> None:
    raw = drawn(64, torch.uint64, Integers(0, 1 << 64), Key(0, 0)).tolist()
    words = [raw[16 * word] & 0xFFFFFFFF for word in range(4)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("level", _core.LEVELS if _core else [])
@pytest.mark.parametrize("start", [0, FAR])
def test_every_level_gives_the_bits_of_the_reference(level: str, start: int) -> None:
    count = 10_007
    for dtype, distribution in cases():
        target = torch.empty(count, dtype=dtype)
        recipe = philox._recipe(distribution, dtype)
        _core.fill_random(
            target.data_ptr(),
            _core.DTYPES[name_of(dtype)],
            _core.DISTRIBUTIONS[recipe.name],
            KEY.seed,
            KEY.stream,
            (1 << 60,),
            (start,),
            (count,),
            recipe.a,
            recipe.b,
            _core.LEVELS[level],
        )
        expected = by_reference(count, dtype, distribution, start)
        assert torch.equal(bits(target), bits(expected)), (dtype, distribution)


@pytest.mark.parametrize(
    ("dtype", "index", "number"),
    [(torch.float64, 97_883_107, 6.639053606435829), (torch.float32, 195_766_243, 6.3355331)],
)
def test_the_far_tail_agrees(dtype: torch.dtype, index: int, number: float) -> None:
    """One number in a hundred million takes this branch; these were searched for."""
    numbers = drawn(64, dtype, Normal(), start=index - 10)
    assert numbers[10].item() == pytest.approx(number, rel=1e-6)
    assert torch.equal(numbers, by_reference(64, dtype, Normal(), index - 10))


def test_without_the_core_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn_numbers() -> list[Tensor]:
        return [
            fill(torch.empty(7, 30, dtype=dtype), KEY, distribution, (9, 40), (2, 5))
            for dtype, distribution in cases()
        ]

    with_core = drawn_numbers()
    monkeypatch.setattr(philox, "_core", None)
    for case, one, other in zip(cases(), with_core, drawn_numbers(), strict=True):
        assert torch.equal(bits(one), bits(other)), case


# ---- parts of a whole


@st.composite
def parts(draw: st.DrawFn) -> tuple[Ints, tuple[slice, ...]]:
    """A shape and a box within it; either may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=4)))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    return shape, tuple(slice(begin, end) for begin, end in ends)


@given(part=parts(), case=st.sampled_from(list(cases())), seed=st.integers(0, 1 << 64))
def test_any_part_is_that_of_the_whole(
    part: tuple[Ints, tuple[slice, ...]],
    case: tuple[torch.dtype, Distribution],
    seed: int,
) -> None:
    (shape, box), (dtype, distribution), key = part, case, Key(seed, 1)
    whole = fill(torch.empty(shape, dtype=dtype), key, distribution)
    expected = whole[box]
    offsets = [one.start for one in box]
    got = fill(torch.empty(expected.shape, dtype=dtype), key, distribution, shape, offsets)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("width", [1, 7, 23, 24, 63])
def test_narrow_parts(width: int) -> None:
    """Widths that are drawn element by element, and widths just above."""
    for dtype, distribution in cases():
        whole = fill(torch.empty(50, 150, dtype=dtype), KEY, distribution)
        part = torch.empty(49, width, dtype=dtype)
        fill(part, KEY, distribution, (50, 150), (1, 80))
        assert torch.equal(bits(part), bits(whole[1:, 80 : 80 + width])), (dtype, distribution)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("distribution", [Normal(3.0, 2.0), Uniform(1, 2), Bernoulli(0.5, 2.0)])
def test_complex_parts(dtype: torch.dtype, distribution: Distribution) -> None:
    whole = fill(torch.empty(9, 5, dtype=dtype), KEY, distribution)
    part = fill(torch.empty(4, 2, dtype=dtype), KEY, distribution, (9, 5), (3, 2))
    assert torch.equal(part, whole[3:7, 2:4])


@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [(torch.float32, Integers(-3, 9)), (torch.int16, Bernoulli(0.5)), (torch.uint8, Bernoulli(0))],
)
def test_numbers_of_another_kind_are_converted(
    dtype: torch.dtype, distribution: Distribution
) -> None:
    numbers = drawn(1000, dtype, distribution)
    source = torch.int64 if isinstance(distribution, Integers) else torch.float64
    assert torch.equal(numbers, drawn(1000, source, distribution).to(dtype))


def test_strides_and_flags_do_not_matter() -> None:
    expected = fill(torch.empty(6, 10), KEY, Normal())
    assert torch.equal(fill(torch.empty(10, 6).t(), KEY, Normal()), expected)
    assert torch.equal(fill(torch.empty(6, 20)[:, ::2], KEY, Normal()), expected)
    pairs = torch.empty(6, 10, dtype=torch.complex64)
    assert torch.equal(fill(pairs.conj().imag, KEY, Normal()), expected)
    parts = fill(torch.empty(4, dtype=torch.complex64), KEY, Normal())
    assert torch.equal(fill(torch.empty(4, dtype=torch.complex64).conj(), KEY, Normal()), parts)


def test_autograd_sees_a_new_version_and_no_operation() -> None:
    leaf = torch.nn.Parameter(torch.zeros(100))
    other = leaf * leaf
    assert fill(leaf, KEY, Uniform()) is leaf
    assert leaf.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other.sum(), leaf)
    with torch.inference_mode():
        fill(torch.empty(10), KEY, Uniform())


def test_meta_tensors_and_scalars() -> None:
    assert fill(torch.empty(3, device="meta"), KEY, Normal()).shape == (3,)
    scalar = fill(torch.empty(()), KEY, Normal())
    assert scalar.item() == drawn(1, torch.float32, Normal()).item()


# ---- the distributions

COUNT = 1 << 20


def kolmogorov_smirnov(probabilities: Tensor) -> float:
    """The largest distance from the uniform distribution on [0, 1], times sqrt(count)."""
    ordered = probabilities.double().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    distance = torch.maximum((steps - ordered).abs().max(), (ordered - steps).abs().max())
    return distance.item() * math.sqrt(len(ordered))


#: Exceeded by one set of uniform numbers in a thousand.
RARE_DISTANCE = 1.95
#: Deviations from the mean that one in ten thousand is beyond.
RARE_DEVIATIONS = 4.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uniform_numbers_are(dtype: torch.dtype) -> None:
    numbers = drawn(COUNT, dtype, Uniform(2, 6))
    assert 2 <= numbers.min() < numbers.max() < 6
    assert kolmogorov_smirnov((numbers.double() - 2) / 4) < RARE_DISTANCE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_numbers_are(dtype: torch.dtype) -> None:
    z = drawn(COUNT, dtype, Normal()).double()
    assert kolmogorov_smirnov(torch.special.ndtr(z)) < RARE_DISTANCE
    # The moments of order 1 to 4, each with the deviation that a mean of COUNT numbers has.
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        off = (z**power).mean().item() - mean
        assert abs(off) < RARE_DEVIATIONS * math.sqrt(variance / COUNT), power
    beyond = (z.abs() > 4).sum().item()
    expected = COUNT * 2 * NormalDist().cdf(-4)
    assert abs(beyond - expected) < RARE_DEVIATIONS * math.sqrt(expected)


def test_complex_normal_numbers_are() -> None:
    numbers = drawn(COUNT, torch.complex128, Normal(3.0, 2.0))
    for part, mean in ((numbers.real, 3.0), (numbers.imag, 0.0)):
        z = (part - mean) / math.sqrt(2.0)
        assert kolmogorov_smirnov(torch.special.ndtr(z)) < RARE_DISTANCE
    assert abs((numbers.real * numbers.imag).mean()) < RARE_DEVIATIONS * 5 / math.sqrt(COUNT)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=name_of
)
def test_normal_numbers_are_the_quantiles_of_their_bits(
    dtype: torch.dtype, tolerance: float
) -> None:
    raw = philox_reference.Bits(torch.arange(20_000), KEY.seed, KEY.stream)
    upper, lower = raw.wide() if dtype == torch.float64 else (raw.narrow(), torch.tensor([0]))
    digits = 53 if dtype == torch.float64 else 31
    whole = ((upper & 0x7FFFFFFF) << 22) + (lower >> 10) >> 53 - digits
    quantile = NormalDist().inv_cdf
    tails = [(x + 0.5) / 2 ** (digits + 1) for x in whole.tolist()]
    sizes = torch.tensor([-quantile(tail) for tail in tails], dtype=torch.float64)
    expected = torch.where(upper >> 31 == 0, sizes, -sizes)
    numbers = drawn(20_000, dtype, Normal())
    assert_close(numbers.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("distribution", [Normal(2, 3), Uniform(-1, 5)])
def test_16_bit_numbers_are_those_of_float32_rounded(
    dtype: torch.dtype, distribution: Distribution
) -> None:
    rounded = drawn(COUNT, torch.float32, distribution).to(dtype)
    numbers = drawn(COUNT, dtype, distribution)
    if isinstance(distribution, Uniform):
        assert (numbers < distribution.high).all()
        numbers = torch.where(rounded < distribution.high, numbers, rounded)
    assert torch.equal(numbers, rounded)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_uniform_numbers_stay_below_the_bound(dtype: torch.dtype) -> None:
    """Even where only two numbers lie between the bounds, and most sums round to the upper one."""
    step = torch.finfo(dtype).eps
    numbers = drawn(1000, dtype, Uniform(1.0, 1 + 2 * step))
    assert set(numbers.tolist()) == {1.0, 1 + step}
    assert set(drawn(100, dtype, Uniform(-step, 0.0)).sign().tolist()) == {-1.0}
    assert set(drawn(100, dtype, Uniform(2, 2)).tolist()) == {2.0}


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2), (-7, 10), (0, 1000), (5, (1 << 16) + 6), (0, 3 << 61)]
)
def test_integers_are_even(low: int, high: int) -> None:
    numbers = drawn(COUNT, torch.int64, Integers(low, high))
    assert low <= numbers.min() <= numbers.max() < high
    buckets = min(high - low, 1000)
    counts = torch.histc((numbers.double() - low) / (high - low), buckets, 0, 1)
    expected = COUNT / buckets
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    freedom = buckets - 1
    assert abs(chi_square - freedom) < RARE_DEVIATIONS * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("keep", [0.0, 2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-33, 1.0])
def test_bernoulli_keeps_as_many_as_it_should(keep: float) -> None:
    numbers = drawn(COUNT, torch.float32, Bernoulli(keep, 1.25))
    assert set(numbers.tolist()) <= {0.0, 1.25}
    kept = (numbers == 1.25).sum().item()
    assert abs(kept - COUNT * keep) <= RARE_DEVIATIONS * math.sqrt(COUNT * keep * (1 - keep)) + 0.5
    assert torch.equal(numbers != 0, drawn(COUNT, torch.bool, Bernoulli(keep)))


def test_every_bit_is_even_and_alone() -> None:
    raw = drawn(1 << 16, torch.int64, Integers(-(1 << 63), 1 << 63))
    signs = ((raw[:, None] >> torch.arange(64)) & 1) * 2.0 - 1
    deviation = 1 / math.sqrt(len(raw))
    assert signs.mean(0).abs().max() < RARE_DEVIATIONS * deviation
    correlations = (signs.T @ signs) / len(raw) - torch.eye(64)
    assert correlations.abs().max() < 5 * deviation  # of 2016


@pytest.mark.parametrize(
    "other",
    [Key(2012, 4), Key(2011, 5), Key(4, 2011), Key(2011 + (1 << 32), 4), Key(2011, 4 + (1 << 32))],
)
def test_keys_are_independent(other: Key) -> None:
    one, two = drawn(COUNT, torch.float64, Normal()), drawn(COUNT, torch.float64, Normal(), other)
    for shift in (0, 1, 16, 64):
        correlation = (one * two.roll(shift)).mean().item()
        assert abs(correlation) < RARE_DEVIATIONS / math.sqrt(COUNT)


def test_neighbours_are_independent() -> None:
    numbers = drawn(COUNT, torch.float64, Normal())
    for shift in (1, 2, 4, 16, 32, 64, 1024):
        correlation = (numbers * numbers.roll(shift)).mean().item()
        assert abs(correlation) < RARE_DEVIATIONS / math.sqrt(COUNT)


def test_keys_are_modulo_two_to_the_64() -> None:
    one = drawn(100, torch.float32, Normal(), Key(-1, 1 << 64))
    assert torch.equal(one, drawn(100, torch.float32, Normal(), Key((1 << 64) - 1, 0)))


# ---- mistakes


@pytest.mark.parametrize(
    ("dtype", "distribution", "message"),
    [
        (torch.int64, Uniform(), "torch.int64 has no random numbers like Uniform"),
        (torch.bool, Normal(), "torch.bool has no random numbers like Normal"),
        (torch.complex64, Integers(0, 2), "torch.complex64 has no random numbers like Integers"),
        (
            torch.float8_e4m3fn,
            Bernoulli(0.5),
            "torch.float8_e4m3fn has no random numbers like Bern",
        ),
    ],
)
def test_dtypes_without_such_numbers(
    dtype: torch.dtype, distribution: Distribution, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        fill(torch.empty(3, dtype=dtype), KEY, distribution)


@pytest.mark.parametrize(
    ("dtype", "distribution", "message"),
    [
        (torch.float16, Uniform(0, 1e5), r"from \[0, 100000.0\) span more than torch.float16"),
        (torch.float32, Uniform(-2e38, 2e38), "span more than torch.float32"),
        (torch.uint8, Integers(-1, 5), r"from \[-1, 5\) do not fit torch.uint8.* 0 to 255"),
        (torch.bool, Integers(0, 3), "do not fit torch.bool"),
        (torch.float16, Integers(0, 5000), "do not fit torch.float16.*2048"),
    ],
)
def test_bounds_that_the_dtype_lacks(
    dtype: torch.dtype, distribution: Distribution, message: str
) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        fill(tensor, KEY, distribution)
    assert tensor.count_nonzero() == 0


def test_distributions_that_are_none() -> None:
    with pytest.raises(ValueError, match="low <= high, got 2 and 1"):
        Uniform(2, 1)
    with pytest.raises(ValueError, match="finite"):
        Uniform(0, math.inf)
    with pytest.raises(ValueError, match="std >= 0, got -1"):
        Normal(0, -1)
    with pytest.raises(ValueError, match="low < high"):
        Integers(3, 3)
    with pytest.raises(ValueError, match=r"probability in \[0, 1\], got nan"):
        Bernoulli(math.nan)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ((4, 4), (2, 0)),
        ((4, 4), (-1, 0)),
        ((4,), (0,)),
        ((4, 4), (0,)),
        ((1 << 40, 1 << 40), (0, 0)),
    ],
)
def test_parts_outside_of_the_whole(shape: Ints, offsets: Ints) -> None:
    with pytest.raises(ValueError, match=r"does not lie in|fewer than 2\*\*63"):
        fill(torch.empty(3, 3), KEY, Normal(), shape, offsets)


@needs_core
@pytest.mark.parametrize(
    ("dtype", "distribution", "place", "message"),
    [
        ("int64", "normal", ((4,), (0,), (4,)), "normal is not drawn as int64"),
        ("float32", "normal", ((4,), (0,), (5,)), r"dim 0: \[0, \+5\) of 4"),
        ("float32", "normal", ((4,), (0, 0), (4,)), "as many dims, got 1, 2 and 1"),
        ("float32", "normal", ((1 << 62, 4), (0, 0), (1, 1)), r"fewer than 2\^63"),
    ],
)
def test_the_core_refuses(
    dtype: str, distribution: str, place: tuple[Ints, Ints, Ints], message: str
) -> None:
    memory = torch.zeros(8, dtype=torch.int64)
    codes = (_core.DTYPES[dtype], _core.DISTRIBUTIONS[distribution])
    shape, offsets, sizes = place
    with pytest.raises(ValueError, match=message):
        _core.fill_random(memory.data_ptr(), *codes, 1, 2, shape, offsets, sizes, 0, 1)
    assert memory.count_nonzero() == 0
