"""The header that ranks exchange before a collective, and its comparison."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Final, get_args

import torch
from torch import Tensor

from tilework.comm.forms import FORMS, MANY_INPUTS, MANY_OUTPUTS, Kind, Operation, Parts, op_type
from tilework.comm.reduce_op import COMPLEX_DTYPES, REAL_DTYPES, RedOpType

# Engines see complex numbers as pairs, float8 as bytes, and a shape only as a size.

#: The bits of a parts' label for dtype and number of dims; the other bits are of the shape.
_DIMS: Final = 0xFFFF_FFFF
#: The label of a tensor without elements, which agrees with every label.
ANY: Final = 0
_ELEMENTWISE: Final = frozenset(form.kind for form in FORMS.values() if len(form.sides) == 1)
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_START, _FACTOR = 0xCBF2_9CE4_8422_2325, 0x0000_0100_0000_01B3  # FNV-1a, as in the core
#: All engines know these natively.
_KNOWN: Final = frozenset(REAL_DTYPES)


def shape_label(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """A hash of a shape, for ranks to compare; and of the dtype if engines may confuse it."""
    label = _START
    for size in sizes:
        label = (label ^ size) * _FACTOR & _MASK
    return label if dtype in _KNOWN else (label ^ zlib.crc32(str(dtype).encode())) * _FACTOR & _MASK


def message_label(tensor: Tensor) -> int:
    """The label (a number for dtype and shape) that sender and receiver compare."""
    return shape_label(tuple(tensor.shape), tensor.dtype)


def call_label(kind: Kind, tensor: Tensor | None, alike: bool = True) -> int:
    """The label (a number for dtype and shape) by which ranks compare their tensors.

    ``tensor`` has the shape that all ranks share: the input, or the output if ranks receive parts;
    ``alike``: so have all parts that this rank knows of. See :func:`labels_agree`.
    """
    if tensor is None:
        return _START
    shape = tuple(tensor.shape)
    if kind in _ELEMENTWISE:
        return shape_label(shape, tensor.dtype)
    if tensor.numel() == 0:
        return ANY
    dims = shape_label((len(shape),), tensor.dtype) & _DIMS
    return dims | shape_label(shape, torch.uint8) & ~_DIMS | (_DIMS + 1) if alike else dims


def labels_agree(labels: Sequence[int], even: bool) -> bool:
    """True if labels agree in dtype and dims, and in shape if ``even``; ANY agrees with all."""
    known = [label for label in labels if label != ANY]
    shapes = even and all(label & ~_DIMS for label in known)
    return len({label if shapes else label & _DIMS for label in known}) <= 1


def same_shapes(tensors: Sequence[Tensor], tensor: Tensor) -> bool:
    """True if all ``tensors`` have the shape of ``tensor``."""
    return all(each.shape == tensor.shape for each in tensors)


#: The fields, the elements for each rank, and those expected from each rank. All ranks have the
#: same number of ints.
Header = Sequence[int]

_KINDS: dict[Kind, int] = {kind: code for code, kind in enumerate(get_args(Kind))}
_DTYPES: dict[torch.dtype | None, int] = {
    dtype: code for code, dtype in enumerate((None, *REAL_DTYPES, *COMPLEX_DTYPES))
}
_REDUCTIONS = {name: i for i, name in enumerate(("none", *(op.value for op in RedOpType)))}
_FIELDS = (
    "operation",
    "dtype",
    "reduction",
    "root",
    "dtype or shape as given",
    "how their tensors came about",
)
_LABEL = 4
#: Headers are signed numbers of 64 bits.
_MOST = 0x7FFF_FFFF_FFFF_FFFF
#: The count for kinds that compare shapes instead; and in facts, of parts of different sizes.
_NOTHING, _UNEVEN = -1, -2
_KIND: Final = struct.Struct("=q")
_FACTS: Final = struct.Struct(f"={len(_FIELDS) + 1}q")


def compare_calls(
    operation: Operation, rank: int, size: int, gather: Callable[[bytes], bytes]
) -> tuple[tuple[int, ...], str]:
    """Compare this rank's operation with those of all ranks, whose bytes ``gather`` gives in order;
    return what :func:`disagreement` does. Collective.

    Equal facts of a fixed size prove that calls agree. Only where they differ, or where a rank has
    parts of different sizes, whole headers follow.
    """
    count = _common_count(operation, size)
    own = _FACTS.pack(*_fields(operation), count)
    if gather(own) == own * size and count != _UNEVEN:
        return (), ""
    layout = struct.Struct(f"={len(_FIELDS) + 2 * size}q")
    gathered = gather(layout.pack(*header_of(operation, rank, size)))
    return disagreement([*layout.iter_unpack(gathered)])


def called_kinds(gathered: bytes, size: int) -> list[str]:
    """The kinds of all ranks' operations, by what ``gather`` gave :func:`compare_calls`."""
    kinds, count = get_args(Kind), len(gathered) // size
    return [kinds[_KIND.unpack_from(gathered, count * rank)[0]] for rank in range(size)]


def _common_count(op: Operation, size: int) -> int:
    """The elements for each rank, if all parts that this rank knows of have as many."""
    if op.kind in _ELEMENTWISE:
        return _NOTHING
    counts = {
        parts.numel() // (size if op.kind in many else 1)
        for parts, many in ((op.inputs, MANY_INPUTS), (op.outputs, MANY_OUTPUTS))
        if isinstance(parts, Tensor)
    }
    for parts in (op.inputs, op.outputs):
        if not isinstance(parts, Tensor):
            counts.update([part.numel() for part in parts])
    if not counts:
        return _NOTHING
    return counts.pop() if len(counts) == 1 else _UNEVEN


def header_of(operation: Operation, rank: int, size: int) -> Header:
    """The numbers by which ranks compare calls: kind, dtype, reduction, root, labels and sizes."""
    counts = *_counts_sent(operation, rank, size), *_counts_expected(operation, rank, size)
    return [*_fields(operation), *counts]


def _fields(operation: Operation) -> tuple[int, ...]:
    return (
        _KINDS[operation.kind],
        _dtype_code(operation.dtype),
        _REDUCTIONS[op_type(operation.reduce_op)],
        operation.root,
        operation.label & _MOST,
        operation.provenance & _MOST,
    )


def _dtype_code(dtype: torch.dtype | None) -> int:
    """The number of a dtype in a header; None, the dtype of a barrier, has a number, too."""
    code = _DTYPES.get(dtype)
    return zlib.crc32(str(dtype).encode()) if code is None else code


def _counts(parts: Parts, size: int) -> list[int]:
    if isinstance(parts, Tensor):
        return [parts.numel() // size] * size
    return [part.numel() for part in parts]


def _only(rank: int, size: int, count: int) -> list[int]:
    counts = [_NOTHING] * size
    counts[rank] = count
    return counts


def _counts_sent(op: Operation, rank: int, size: int) -> list[int]:
    if op.kind == "all_gather":
        return [op.inputs[0].numel()] * size
    if op.kind == "gather":
        return _only(op.root, size, op.inputs[0].numel())
    if op.kind in ("reduce_scatter", "all_to_all") or (op.kind == "scatter" and rank == op.root):
        return _counts(op.inputs, size)
    return [_NOTHING] * size


def _counts_expected(op: Operation, rank: int, size: int) -> list[int]:
    if op.kind == "reduce_scatter":
        return [op.outputs[0].numel()] * size
    if op.kind == "scatter":
        return _only(op.root, size, op.outputs[0].numel())
    if op.kind in ("all_gather", "all_to_all") or (op.kind == "gather" and rank == op.root):
        return _counts(op.outputs, size)
    return [_NOTHING] * size


def disagreement(headers: Sequence[Header]) -> tuple[tuple[int, ...], str]:
    """The ranks that disagree with rank 0, or in a pair's sizes, and how; () and "" if none do."""
    size, count = len(headers), len(_FIELDS)
    for i in (i for i in range(count) if i != _LABEL):
        odd = [rank for rank, header in enumerate(headers) if header[i] != headers[0][i]]
        if odd:
            return (0, *odd), f"they differ in {_FIELDS[i]}"
    sent = [tuple(header[count : count + size]) for header in headers]
    expected = list(zip(*(header[count + size :] for header in headers), strict=True))
    if sent == expected:
        labels = [header[_LABEL] for header in headers]
        even = len({n for row in sent for n in row if n != _NOTHING}) <= 1
        if labels_agree(labels, even):
            return (), ""
        return tuple(range(size)), f"they differ in {_FIELDS[_LABEL]}"
    i = next(rank for rank in range(size) if sent[rank] != expected[rank])
    j = next(rank for rank in range(size) if sent[i][rank] != expected[i][rank])
    return (i, j), (
        f"they differ in sizes: rank {i} has {sent[i][j]} elements for rank {j}, "
        f"which expects {expected[i][j]}"
    )
