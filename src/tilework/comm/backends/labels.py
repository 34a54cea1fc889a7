"""Labels: numbers for the dtype and shape of a tensor as the caller gave it, compared by ranks.

Engines see complex numbers as pairs, float8 as bytes, and a shape only as a size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from tilework.comm.forms import FORMS, Kind

#: The bits of a parts' label for dtype and number of dims; the other bits are of the shape.
_DIMS: Final = 0xFFFF_FFFF
#: The label of a tensor without elements, which agrees with every label.
ANY: Final = 0
_ELEMENTWISE: Final = frozenset(form.kind for form in FORMS.values() if len(form.sides) == 1)
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_START, _FACTOR = 0xCBF2_9CE4_8422_2325, 0x0000_0100_0000_01B3  # FNV-1a, as in the core
#: Dtypes that all engines know natively.
_KNOWN: Final = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)


def shape_label(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """A hash of a shape, for ranks to compare; and of the dtype if engines may confuse it.

    Example:
        >>> shape_label((2, 3), torch.float32) == shape_label((6,), torch.float32)
        False
        >>> shape_label((6,), torch.float32) == shape_label((6,), torch.complex64)
        False
    """
    label = _START
    for size in sizes:
        label = (label ^ size) * _FACTOR & _MASK
    return label if dtype in _KNOWN else (label ^ zlib.crc32(str(dtype).encode())) * _FACTOR & _MASK


def message_label(tensor: Tensor) -> int:
    """The label (a number for dtype and shape) by which a sent tensor is compared with the
    receiver's.
    """
    return shape_label(tuple(tensor.shape), tensor.dtype)


def call_label(kind: Kind, tensor: Tensor | None, alike: bool = True) -> int:
    """The label (a number for dtype and shape) by which ranks compare their tensors in an
    operation.

    :func:`labels_agree` compares the labels of all ranks; the label ANY agrees with all.

    Args:
        kind: The operation.
        tensor: This rank's tensor with the shape that all ranks share: the input, or the output if
            ranks receive parts. None if there is none.
        alike: Whether all parts that this rank knows of have the shape of ``tensor``.
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
    """True if the labels of all ranks agree in dtype and number of dims and, if ``even`` (all parts
    have the same size), in shape. ANY agrees with all.
    """
    known = [label for label in labels if label != ANY]
    shapes = even and all(label & ~_DIMS for label in known)
    return len({label if shapes else label & _DIMS for label in known}) <= 1


def same_shapes(tensors: Sequence[Tensor], tensor: Tensor) -> bool:
    """True if all ``tensors`` have the shape of ``tensor``."""
    return all(each.shape == tensor.shape for each in tensors)
