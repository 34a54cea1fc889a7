"""Factor maps: the loops (factors) that the dims of an operator's tensors run over, as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Factor:
    """A loop of an operator: dims of inputs and outputs that run over it are sharded together.

    Compared by identity. A mesh axis may shard one factor, or none.

    Args:
        unshardable: Whether each rank needs all of it.
        reduce_op: The reduction of the ranks' results if the factor is sharded and an output lacks
            it; None: there is no reduction.
    """

    __slots__ = ("name", "reduce_op", "size", "unshardable")

    def __init__(
        self, size: int, name: str = "", *, unshardable: bool = False, reduce_op: str | None = "sum"
    ) -> None:
        self.size, self.name = size, name
        self.unshardable, self.reduce_op = unshardable, reduce_op

    def __repr__(self) -> str:
        return f"{self.name or 'factor'}={self.size}{'!' if self.unshardable else ''}"


#: The factors that a dim runs over, the outermost first. Empty for a dim that is broadcast or never
#: sharded.
Dim = tuple[Factor, ...]
#: The factors of each dim of a tensor.
DimFactors = tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class FactorMap:
    """The factors of all tensors of a call.

    Args:
        inputs: For each tensor among the arguments, in order, the factors of the dims.
        outputs: The same for each tensor of the result.
        linear: Sets of inputs (their numbers) in which the operator is linear, jointly within a
            set: if all of a set are partial sums, and the others are not, the result is one, too.
        rearranges: Whether the operator only moves, repeats or drops elements: then any Partial
            passes.
        addends: Inputs that are added to a sum over factors that no output has: where such a
            factor is sharded, only one rank adds them.
        extremum: "max" or "min" if results are the greatest or the least elements of all inputs:
            then inputs that are partial in that reduction may stay partial.
    """

    inputs: tuple[DimFactors, ...]
    outputs: tuple[DimFactors, ...]
    linear: tuple[frozenset[int], ...] = ()
    rearranges: bool = False
    addends: frozenset[int] = frozenset()
    extremum: str | None = None

    def reduces(self, factor: Factor) -> bool:
        return not any(factor in dim for out in self.outputs for dim in out)

    def __str__(self) -> str:
        def written(tensors: Sequence[DimFactors]) -> str:
            return ", ".join(
                " ".join("(" + " ".join(map(str, dim)) + ")" for dim in dims) for dims in tensors
            )

        return f"{written(self.inputs)} -> {written(self.outputs)}"


def factors_of(shape: Sequence[int], names: str = "") -> list[Factor]:
    """A factor for each dim of a shape."""
    return [Factor(size, names[i : i + 1] or f"d{i}") for i, size in enumerate(shape)]


def dim_factors(dims: Sequence[Factor | Dim | None]) -> DimFactors:
    """The factors of each dim, from single factors, tuples of them, and None for no factors."""
    return tuple(
        () if dim is None else (dim,) if isinstance(dim, Factor) else tuple(dim) for dim in dims
    )


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[list[Factor], list[DimFactors]]:
    """A factor for each dim of the broadcast shape; each shape's dims, () where stretched."""
    ndim = max(map(len, shapes), default=0)
    sizes = [1] * ndim
    for shape in shapes:
        for at, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                sizes[at] = size
    factors = factors_of(sizes)
    dims_of_each: list[DimFactors] = [
        tuple(
            (factors[at],) if size == sizes[at] else ()
            for at, size in enumerate(shape, ndim - len(shape))
        )
        for shape in shapes
    ]
    return factors, dims_of_each


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that shapes are broadcast to (torch's function is slow to import)."""
    factors, _ = broadcast(shapes)
    sizes = tuple(factor.size for factor in factors)
    for shape in shapes:
        for size, broadcast_size in zip(reversed(shape), reversed(sizes), strict=False):
            if size not in (1, broadcast_size):
                raise ValueError(f"shapes {list(map(tuple, shapes))} do not broadcast together")
    return sizes


# -- the language ----------------------------------------------------------------------------

_TOKEN = re.compile(r"([A-Za-z_]\w*)([*!]?)$")


@dataclass(frozen=True)
class _Token:
    """A name in a pattern, which stands for a dim or for several dims."""

    name: str
    many: bool
    """Whether the name stands for any number of dims, aligned at the last and broadcast."""
    unshardable: bool
    """Whether ``!`` follows the name here: then the factor is unshardable in all tensors."""


@dataclass(frozen=True)
class _Slot:
    """A tensor in a pattern: the names of the dims, and True if it may be missing."""

    tokens: tuple[_Token, ...]
    optional: bool


@dataclass(frozen=True)
class Pattern:
    """A factor map for any shapes, as text: ``b* i, o i, o? -> b* o``.

    Commas separate tensors: all tensor arguments, in order, and after ``->`` all tensors of the
    result. A tensor is written as the names of the factors of its dims. ``b*`` stands for any
    number of dims, which are broadcast as in torch; ``i!`` for an unshardable dim. A tensor that
    ends in ``?`` may be None; all dims of it are broadcast.

    A factor that no output has is reduced: by a sum, unless ``reduce_ops`` says otherwise.

    Raises:
        ValueError: The text is not such a line.

    Example:
        >>> pattern = Pattern.parse("b* i, o i, o? -> b* o")
        >>> print(pattern.of([(2, 5, 3), (4, 3), None]))
        (b0=2) (b1=5) (i=3), (o=4) (i=3) -> (b0=2) (b1=5) (o=4)
    """

    text: str
    inputs: tuple[_Slot, ...]
    outputs: tuple[_Slot, ...]
    reduce_ops: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, reduce_ops: Mapping[str, str | None] | None = None) -> Pattern:
        sides, reduce_ops = text.split("->"), dict(reduce_ops or {})
        if len(sides) != 2:
            raise ValueError(
                f"a rule is a line like 'b* i, o i -> b* o' with one '->', got {text!r}"
            )
        inputs, outputs = ([_slot(part, text) for part in side.split(",")] for side in sides)
        for slot in inputs:
            if sum(token.many for token in slot.tokens) > 1:
                raise ValueError(f"an input in {text!r} has more than one name with *")
        known = {token.name for slot in inputs for token in slot.tokens}
        for slot in outputs:
            for token in slot.tokens:
                if token.name not in known:
                    raise ValueError(
                        f"{token.name!r} is in the result of {text!r}, but in none of the inputs"
                    )
        for name in reduce_ops:
            if name not in known:
                raise ValueError(f"{text!r} has no factor {name!r} to be reduced")
        return cls(text, tuple(inputs), tuple(outputs), reduce_ops)

    def of(self, shapes: Sequence[Sequence[int] | None]) -> FactorMap:
        """The factor map for arguments of these shapes; None stands for a missing argument."""
        if len(shapes) > len(self.inputs):
            raise ValueError(f"{self.text!r} is for {len(self.inputs)} tensors, got {len(shapes)}")
        slots = self.inputs[: len(shapes)]
        for slot in self.inputs[len(shapes) :]:
            if not slot.optional:
                raise ValueError(f"{self.text!r} needs {len(self.inputs)} tensors, got {shapes}")
        spans = [
            None if shape is None else self._spans(slot, shape)
            for slot, shape in zip(slots, shapes, strict=True)
        ]
        sizes = self._sizes(spans)
        factors = {
            name: [
                Factor(
                    size,
                    name if len(extents) == 1 else f"{name}{i}",
                    unshardable=name in self._unshardable,
                    reduce_op=self.reduce_ops.get(name, "sum"),
                )
                for i, size in enumerate(extents)
            ]
            for name, extents in sizes.items()
        }
        inputs = [
            self._dims(slot, span, factors)
            for slot, span in zip(slots, spans, strict=True)
            if span is not None
        ]
        outputs = [
            dim_factors([factor for token in slot.tokens for factor in factors[token.name]])
            for slot in self.outputs
        ]
        return FactorMap(tuple(inputs), tuple(outputs))

    @property
    def _unshardable(self) -> set[str]:
        return {
            token.name
            for slot in (*self.inputs, *self.outputs)
            for token in slot.tokens
            if token.unshardable
        }

    def _spans(self, slot: _Slot, shape: Sequence[int]) -> list[tuple[str, list[int]]]:
        many = [token for token in slot.tokens if token.many]
        rest = len(shape) - (len(slot.tokens) - len(many))
        if rest < 0 or (rest > 0 and not many):
            raise ValueError(
                f"a tensor of shape {list(shape)} does not have the dims that {self.text!r} needs"
            )
        spans, at = [], 0
        for token in slot.tokens:
            width = rest if token.many else 1
            spans.append((token.name, list(shape[at : at + width])))
            at += width
        return spans

    def _sizes(self, spans: Sequence[list[tuple[str, list[int]]] | None]) -> dict[str, list[int]]:
        known_sizes: dict[str, list[int]] = {}
        for span in spans:
            for name, sizes in span or ():
                known = known_sizes.setdefault(name, [])
                known[:0] = [1] * (len(sizes) - len(known))
                for at, size in enumerate(sizes, len(known) - len(sizes)):
                    if size != 1:
                        if known[at] not in (1, size):
                            raise ValueError(
                                f"{name!r} in {self.text!r} has sizes {known[at]} and {size}"
                            )
                        known[at] = size
        for slot in self.outputs:
            for token in slot.tokens:
                known_sizes.setdefault(token.name, [])
        return known_sizes

    def _dims(
        self, slot: _Slot, span: list[tuple[str, list[int]]], factors: Mapping[str, list[Factor]]
    ) -> DimFactors:
        dims: list[Factor | None] = []
        for token, (name, sizes) in zip(slot.tokens, span, strict=True):
            named = factors[name]
            for factor, size in zip(named[len(named) - len(sizes) :], sizes, strict=True):
                if factor.size != size and not (token.many or slot.optional):
                    raise ValueError(
                        f"{name!r} in {self.text!r} has sizes {factor.size} and {size}"
                    )
                dims.append(factor if factor.size == size else None)
        return dim_factors(dims)


def _slot(text_of_tensor: str, text: str) -> _Slot:
    text_of_tensor = text_of_tensor.strip()
    optional = text_of_tensor.endswith("?")
    tokens = []
    for word in text_of_tensor.removesuffix("?").split():
        match = _TOKEN.match(word)
        if match is None:
            raise ValueError(
                f"{word!r} in {text!r} is not a name, a name with * (any number of dims) or a name "
                f"with ! (needed whole); a ? ends an optional tensor"
            )
        tokens.append(_Token(match[1], match[2] == "*", match[2] == "!"))
    return _Slot(tuple(tokens), optional)


def volume(dim: Dim) -> int:
    """The number of elements of a dim."""
    return math.prod(factor.size for factor in dim)
