"""Reductions of contributions.

``ReduceOp.SUM`` and its siblings are members of :class:`RedOpType`, plain names that cost
nothing to compare. ``ReduceOp(name)`` wraps a name, with a factor for PREMUL_SUM. Both are
instances of ``ReduceOp``. A ``ReduceOp`` equals the name that it wraps; a bare name equals only
that name (users of torch.distributed rely on both, see docs/decisions/0003-reduce-op-equality.md).
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import torch

from tilework.layout.internal import called_by_torch


class RedOpType(enum.Enum):
    """The names of the reductions."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"

    # Enum members are singletons: copies and pickles give the member itself, equality is
    # identity, and a ReduceOp on the right-hand side is a different thing.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = enum.Enum.__hash__

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        if called_by_torch():  # torch shows operators that it refuses
            return (
                f"<ReduceOp.{self.name} (tilework): torch.distributed's functions need "
                f"torch.distributed.ReduceOp.{self.name}>"
            )
        return super().__repr__()


class _ReduceOpMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is RedOpType or type.__instancecheck__(cls, instance)


class ReduceOp(metaclass=_ReduceOpMeta):
    """A reduction: one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM.

    - SUM, PRODUCT, MIN, MAX: every dtype of the contract (no order on complex numbers, so no
      MIN and MAX there; ``bool`` sums as OR and multiplies as AND; integers wrap).
    - AVG, PREMUL_SUM: floating-point and complex dtypes.
    - BAND, BOR, BXOR: integers and bool.

    MIN and MAX give NaN if a contribution is NaN. float16 and bfloat16 accumulate in float32 and
    are rounded once.

    Example:
        >>> ReduceOp(ReduceOp.SUM) == ReduceOp.SUM
        True
    """

    SUM: ClassVar[RedOpType] = RedOpType.SUM
    AVG: ClassVar[RedOpType] = RedOpType.AVG
    PRODUCT: ClassVar[RedOpType] = RedOpType.PRODUCT
    MIN: ClassVar[RedOpType] = RedOpType.MIN
    MAX: ClassVar[RedOpType] = RedOpType.MAX
    BAND: ClassVar[RedOpType] = RedOpType.BAND
    BOR: ClassVar[RedOpType] = RedOpType.BOR
    BXOR: ClassVar[RedOpType] = RedOpType.BXOR
    PREMUL_SUM: ClassVar[RedOpType] = RedOpType.PREMUL_SUM

    __slots__ = ("factor", "type")

    type: RedOpType
    factor: float

    def __init__(self, op: AnyReduceOp, factor: float = 1.0) -> None:
        if not isinstance(op, ReduceOp):
            raise TypeError(no_reduction(op))
        bare = isinstance(op, RedOpType)
        object.__setattr__(self, "type", op if bare else op.type)
        object.__setattr__(self, "factor", factor if bare else op.factor)

    @staticmethod
    def from_torch(op: Any) -> AnyReduceOp:
        """The reduction of tilework with the same name as ``op``, a reduction of torch.distributed.

        A reduction of tilework is returned unchanged.

        Raises:
            TypeError: ``op`` is not a reduction of torch.distributed, or is PREMUL_SUM.

        Example:
            >>> import torch.distributed
            >>> ReduceOp.from_torch(torch.distributed.ReduceOp.MAX) == ReduceOp.MAX
            True
        """
        if isinstance(op, ReduceOp):
            return op
        name = _name_in_torch(op)
        if name not in RedOpType.__members__ or name == "PREMUL_SUM":
            raise TypeError(
                f"from_torch takes a reduction of torch.distributed that tilework has, too "
                f"(for PREMUL_SUM use make_premul_sum); got {op!r}"
            )
        return RedOpType[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ReduceOp is immutable; make a new one instead of setting {name}")

    def __eq__(self, other: object) -> bool:
        if other.__class__ is ReduceOp:
            assert isinstance(other, ReduceOp)
            return self.type is other.type and self.factor == other.factor
        return self.type is other and self.factor == 1.0

    def __hash__(self) -> int:
        return hash(self.type)

    def __copy__(self) -> ReduceOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReduceOp:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.type, self.factor)

    def __str__(self) -> str:
        if self.type is RedOpType.PREMUL_SUM:
            return f"PREMUL_SUM({self.factor:g})"
        return self.type.name

    def __repr__(self) -> str:
        return f"<ReduceOp {self}>"


# torch's name for the enumeration; inside the class body it would hide the enumeration.
ReduceOp.RedOpType = RedOpType  # type: ignore[attr-defined]

#: The type that operations accept.
AnyReduceOp = ReduceOp | RedOpType


def make_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """A SUM whose contributions are first multiplied by ``factor``, which may differ by rank.

    Args:
        factor: A number, or a tensor with one element.

    Raises:
        ValueError: ``factor`` has more than one element.

    Example:
        >>> make_premul_sum(0.5)
        <ReduceOp PREMUL_SUM(0.5)>
    """
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ValueError(
                f"the factor of PREMUL_SUM must be one number, got a tensor of shape "
                f"{list(factor.shape)}; scale the tensor itself instead"
            )
        factor = factor.item()
    return ReduceOp(RedOpType.PREMUL_SUM, float(factor))


_FLOATING = {RedOpType.SUM, RedOpType.AVG, RedOpType.PRODUCT, RedOpType.PREMUL_SUM}
_ORDERED = {RedOpType.MIN, RedOpType.MAX}
_BITWISE = {RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DISCRETE = (
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
)  # fmt: skip
#: The dtypes of numbers that can be reduced, but complex numbers.
REAL_DTYPES = (*_FLOATS, *_DISCRETE)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
_LEGAL: dict[torch.dtype, frozenset[RedOpType]] = {
    **dict.fromkeys(_FLOATS, frozenset(_FLOATING | _ORDERED)),
    **dict.fromkeys(COMPLEX_DTYPES, frozenset(_FLOATING)),
    **dict.fromkeys(_DISCRETE, frozenset({RedOpType.SUM, RedOpType.PRODUCT} | _ORDERED | _BITWISE)),
}


def _name_in_torch(op: object) -> str:
    return str(getattr(op, "name", op)).rpartition(".")[2].rstrip(">")


def no_reduction(op: object) -> str:
    """The error message for an object that is not a reduction of this library."""
    names = f"ReduceOp.{', '.join(RedOpType.__members__)}"
    kind = type(op)
    if kind.__module__.startswith(("torch.distributed", "torch._C._distributed")):
        name = _name_in_torch(op)
        if name not in RedOpType.__members__:
            return (
                f"{op!r} of torch.distributed's was passed: tilework's functions take "
                f"tilework.distributed's ReduceOp.{', '.join(RedOpType.__members__)}"
            )
        return (
            f"ReduceOp.{name} of torch.distributed's was passed: tilework's functions take "
            f"tilework.distributed.ReduceOp.{name}, which ReduceOp.from_torch(op) converts it to"
        )
    return f"a reduction must be one of {names}, got {op!r} of type {kind.__name__}"


def supports_complex(reduceOp: AnyReduceOp) -> bool:
    """True if the reduction is defined for complex numbers.

    Example:
        >>> supports_complex(ReduceOp.SUM), supports_complex(ReduceOp.MAX)
        (True, False)
    """
    kind = reduceOp if isinstance(reduceOp, RedOpType) else reduceOp.type
    return kind in _LEGAL[torch.complex64]


def check_reduction(op: AnyReduceOp | None, dtype: torch.dtype) -> None:
    """Raise TypeError if ``op`` is no reduction, ValueError if it is not defined for ``dtype``."""
    kind = op if op.__class__ is RedOpType else getattr(op, "type", None)
    legal = _LEGAL.get(dtype)
    if legal is not None and kind in legal:
        return
    if kind is None:
        raise TypeError(no_reduction(op))
    if legal is None:
        raise ValueError(f"cannot reduce {dtype}: convert to a standard number type first")
    names = ", ".join(sorted(member.name for member in legal))
    raise ValueError(f"ReduceOp.{kind} is not defined for {dtype}; defined are {names}")


def identity_element(op: RedOpType, dtype: torch.dtype) -> bool | int | float:
    """The number that changes nothing in a reduction; NotImplementedError if it has none."""
    if op in (RedOpType.SUM, RedOpType.BOR, RedOpType.BXOR):
        return 0
    if op is RedOpType.PRODUCT:
        return 1
    if op in (RedOpType.MIN, RedOpType.MAX) and dtype.is_floating_point:
        return float("inf") if op is RedOpType.MIN else -float("inf")
    if op in (RedOpType.MIN, RedOpType.MAX, RedOpType.BAND):
        info = None if dtype is torch.bool else torch.iinfo(dtype)
        lowest, highest = (0, 1) if info is None else (info.min, info.max)
        if op is RedOpType.BAND:  # all bits are set
            return highest if lowest == 0 else -1
        return highest if op is RedOpType.MIN else lowest
    raise NotImplementedError(
        f"ReduceOp.{op} has no identity element, so no tensor can be made terms of it"
    )
