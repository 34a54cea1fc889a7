"""Tensors with known contents: the contributions of ranks and the expected results.

Values are small integers, exact in every dtype: results can be compared bit for bit, and a wrong
rank, offset or order shows at once. Where rounding matters a test draws its own values.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tilework.distributed as dist

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
#: Every dtype of the contract.
DTYPES: tuple[torch.dtype, ...] = (*FLOATS, *SIGNED, *UNSIGNED, torch.bool, *COMPLEX)

#: Scalar, empty, one element, odd, several dims, empty within several dims.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3))
#: The layouts in memory; "expanded" repeats elements, and cannot be written.
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")

_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARITHMETIC = ("SUM", "PRODUCT")
_AVERAGES = ("AVG", "PREMUL_SUM")
_ORDER = ("MIN", "MAX")
_BITWISE = ("BAND", "BOR", "BXOR")


def pattern(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of small whole numbers that differ by ``seed`` (often a rank) and position.

    Never zero, so that products show errors.

    Example:
        >>> pattern(1, (3,), torch.int32)
        tensor([ 4,  5, -1], dtype=torch.int32)
    """
    size = torch.Size(shape)
    make = _remembered if size.numel() <= _SMALL else _numbers
    return make(seed, size, dtype).clone()


#: The largest size to cache: a process that holds much memory is slow to fork.
_SMALL = 10_000


@functools.lru_cache(maxsize=1024)
def _remembered(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Made once for all ranks in threads, and for all comparisons.
    with torch.inference_mode(False):
        return _numbers(seed, shape, dtype)


def _numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    index = torch.arange(math.prod(shape), dtype=torch.int32)
    number = (index + index // 5 + 3 * seed) % 5 + 1
    if dtype is torch.bool:
        values = number > 2
    elif dtype.is_complex:
        values = torch.complex(number.double(), (number % 3).double())
    elif dtype in UNSIGNED:
        values = number
    else:
        values = torch.where((index + seed) % 3 == 0, -number, number)
    return values.to(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Case:
    """A shape, a dtype and a layout in memory to try an operation with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.layout} {self.dtype} of shape {list(self.shape)}"

    def value(self, seed: int) -> Tensor:
        """The values of :meth:`make` in a new contiguous tensor."""
        if self.layout == "expanded":
            return self.make(seed).clone(memory_format=torch.contiguous_format)
        return pattern(seed, self.shape, self.dtype)

    def make(self, seed: int) -> Tensor:
        """A tensor in this layout, with values that follow from ``seed``."""
        if self.layout == "expanded" and self.shape:
            thin = pattern(seed, (1, *self.shape[1:]), self.dtype)
            return thin.expand(self.shape)
        return laid_out(pattern(seed, self.shape, self.dtype), self.layout)

    def blank(self) -> Tensor:
        """A tensor to overwrite: in this layout if it can be written."""
        layout = "contiguous" if self.layout == "expanded" else self.layout
        return laid_out(pattern(77, self.shape, self.dtype), layout)

    def writable(self) -> Case:
        """This case in a layout that operations can write in place."""
        layout = "contiguous" if self.layout == "expanded" else self.layout
        return Case(self.shape, self.dtype, layout)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    shape = tuple(values.shape)
    if layout == "transposed" and shape:
        view = torch.empty(shape[::-1], dtype=values.dtype).permute(*reversed(range(len(shape))))
    elif layout == "strided" and shape:
        view = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=values.dtype)[..., ::2]
    elif layout == "offset":
        # Starts at the third element: no vector load of the whole tensor is aligned.
        view = torch.empty(values.numel() + 3, dtype=values.dtype)[3:].view(shape)
    else:
        return values.clone()
    return view.copy_(values)


def cases(dtypes: Iterable[torch.dtype] = DTYPES) -> Iterator[Case]:
    """Every dtype once, every shape and every layout with dtypes of several widths."""
    dtypes = tuple(dtypes)
    for dtype in dtypes:
        yield Case((7,), dtype)
    few = [dtype for dtype in (torch.float32, torch.int8) if dtype in dtypes]
    for dtype, shape in itertools.product(few, SHAPES):
        yield Case(shape, dtype)
    for dtype, layout in itertools.product(few, LAYOUTS[1:]):
        yield Case((4, 3, 5), dtype, layout)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers: equal bits are equal values, NaN included."""
    tensor = tensor.detach().resolve_conj().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BIT_VIEWS[tensor.element_size()])


def assert_same(actual: Tensor, expected: Tensor, what: object = "") -> None:
    """Raise AssertionError unless shape, dtype and every bit agree."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: got {actual.dtype} of shape {list(actual.shape)}, expected "
            f"{expected.dtype} of shape {list(expected.shape)}"
        )
    if torch.equal(bits(actual), bits(expected)):
        return
    differing = (bits(actual) != bits(expected)).nonzero()
    where = differing[0].tolist()
    raise AssertionError(
        f"{what}: {len(differing)} of {actual.numel()} elements differ, the first at {where}: "
        f"got {actual.flatten()[:8]}…, expected {expected.flatten()[:8]}…"
    )


def assert_near(actual: Tensor, expected: Tensor, what: object = "") -> None:
    """Raise AssertionError unless all elements agree up to one rounding in their dtype.

    (torch.testing has better messages, but takes half a second to import in every forked rank.)
    """
    exact = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
    error = (actual.to(exact.dtype) - exact).abs()
    if bool((error > torch.finfo(actual.dtype).eps * exact.abs()).any()):
        raise AssertionError(f"{what}: off by up to {error.max().item():g} from {expected}")


def defined(op: str, dtype: torch.dtype) -> bool:
    """True if the contract defines reduction ``op`` for ``dtype``."""
    if op in _ARITHMETIC:
        return True
    if op in _AVERAGES:
        return dtype.is_floating_point or dtype.is_complex
    if op in _ORDER:
        return not dtype.is_complex
    return not (dtype.is_floating_point or dtype.is_complex)


REDUCE_OPS = (*_ARITHMETIC, *_ORDER, *_BITWISE, "AVG")

_Binary = Callable[[Tensor, Tensor], Tensor]
_COMBINE: dict[str, _Binary] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype of sums: float32 for 16-bit floats, 64 bits for integers."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return dtype
    return torch.int64


def folded(op: str, contributions: Sequence[Tensor]) -> Tensor:
    """The contributions combined in rank order, rounded to their dtype once."""
    dtype = contributions[0].dtype
    wide = [tensor.to(accumulator(dtype)) for tensor in contributions]
    total = functools.reduce(_COMBINE[op], wide)
    if op == "AVG":
        total = total / len(contributions)
    return total.to(dtype)


def reduce_op(op: str) -> dist.ReduceOp:
    """The reduction called ``op``."""
    found: dist.ReduceOp = getattr(dist.ReduceOp, op)
    return found
