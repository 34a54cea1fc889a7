"""The table of collectives, and the record of a call.

A public function makes the record, an :class:`Operation`. The methods of process groups, torch's
methods, functional collectives and captured calls translate into the record, and from it, by the
table :data:`FORMS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tilework.comm.flight.ring import What, describe
from tilework.comm.reduce_op import AnyReduceOp, RedOpType

Kind = Literal[
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "scan",
    "exscan",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
]


Sides = Literal["none", "one", "each", "whole"]


@dataclass(frozen=True, slots=True)
class Side:
    """The tensors that a collective reads on this rank, or those that it writes."""

    #: "none": nothing; "one": a tensor; "each": a list with a tensor for each rank; "whole": a
    #: tensor, of which a part belongs to each rank.
    parts: Sides = "none"
    #: The public function's parameter.
    name: str = ""
    #: True if only the root has these tensors.
    at_root: bool = False

    def is_here(self, is_root: bool) -> bool:
        """True if this rank has these tensors."""
        return self.parts != "none" and (is_root or not self.at_root)


@dataclass(frozen=True)
class Form:
    """A row of the table: a collective, and the way in which callers pass tensors."""

    #: The name of the public function.
    name: str
    #: The name of the group's method.
    method: str
    kind: Kind
    inputs: Side
    outputs: Side
    #: The public function's parameter for the root; "" if there is no root.
    root: str
    reduces: bool

    @cached_property
    def sides(self) -> tuple[Side, ...]:
        """The sides in the order of the method's arguments; a tensor in place counts once."""
        named = {side.name: side for side in (self.inputs, self.outputs) if side.name}
        return tuple(named.values())[::-1]

    @cached_property
    def in_place(self) -> bool:
        """True if each rank has one tensor, which gets the result."""
        return len(self.sides) == 1 and not self.outputs.at_root

    @cached_property
    def has_rows(self) -> bool:
        """True if the method takes the numbers of rows for each rank after the tensors."""
        return [side.parts for side in self.sides] == ["whole", "whole"]

    @cached_property
    def is_nested(self) -> bool:
        """True if the method takes lists of the arguments of the public function."""
        parts = [side.parts for side in self.sides]
        return "whole" not in parts and parts != ["each", "each"]

    @cached_property
    def argument_count(self) -> int:
        """The number of the method's arguments before the options."""
        return len(self.sides) + 2 * self.has_rows

    @cached_property
    def shares_output(self) -> bool:
        """True if the shape that ranks have in common is the output's, else it is the input's."""
        parts = self.inputs.parts
        return parts == "none" or (parts != "one" and self.outputs.parts == "one")

    def beside_root(self, operation: Operation) -> tuple[Parts, Parts]:
        """The inputs and outputs of a rank that is not the root."""
        inputs = () if self.inputs.at_root else operation.inputs
        return inputs, () if self.outputs.at_root else operation.outputs

    def fast_call(self, operation: Operation) -> tuple[Any, ...]:
        """The arguments of a fast path's ``run``."""
        inputs, outputs = operation.inputs, operation.outputs
        given = None if is_absent(inputs) else inputs, None if is_absent(outputs) else outputs
        rows = operation.in_rows, operation.out_rows
        return self.name, *given, operation.reduce_op, operation.root, *rows

    def arguments(self, operation: Operation) -> tuple[Any, ...]:
        """The arguments of the group's method that stand for ``operation``, without options."""
        given = {self.outputs.name: operation.outputs, self.inputs.name: operation.inputs}
        given.pop("", None)
        values = [each if isinstance(each, Tensor) else list(each) for each in given.values()]
        if self.is_nested:
            return tuple([] if is_absent(each) else [each] for each in values)
        rows = operation.out_rows, operation.in_rows
        return (*values, *(list(each or ()) for each in rows if self.has_rows))

    def operations(
        self,
        args: Sequence[Any],
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
        limit: timedelta | None = None,
        is_async: bool = False,
    ) -> list[Operation]:
        """The operations that the method's arguments stand for: one for each element of lists."""
        count = len(self.sides)
        outputs, inputs = (args[0], args[count - 1]) if count else ((), ())
        pairs: Iterable[tuple[Any, Any]] = ((inputs, outputs),)
        if count == 1:
            pairs = [(each, each) for each in outputs]
        elif self.is_nested and count:
            absent = [()] * max(len(inputs), len(outputs))
            pairs = zip(inputs or absent, outputs or absent, strict=True)
        rows = (None, None)
        if len(args) > count:
            rows = args[count + 1] or None, args[count] or None
        op = reduce_op if self.reduces else None
        rest = (op, root, 0.0, self.name, *rows, limit, is_async)
        reads, writes = self.inputs.name != "", self.outputs.name != ""
        return [
            Operation(self.kind, i if reads else (), o if writes else (), *rest) for i, o in pairs
        ]


def _form(
    name: str, method: str, kind: Kind, reads: str = "", writes: str = "", root: str = ""
) -> Form:
    return Form(name, method, kind, _side(reads), _side(writes), root, kind in REDUCING)


def _side(text: str) -> Side:
    parts, _, rest = text.partition(" ")
    name = rest.removesuffix(" at root")
    return Side(cast(Sides, parts), name, name != rest) if text else Side()


#: Kinds that combine the ranks' inputs.
REDUCING: frozenset[Kind] = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"})
#: Kinds that give each rank the reduction of the ranks before it. The root is the rank from which
#: ranks are counted: the group's first or last.
SCANS: frozenset[Kind] = frozenset({"scan", "exscan"})

#: All collectives, by the name of the public function.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        _form("barrier", "barrier", "barrier"),
        _form("broadcast", "broadcast", "broadcast", "", "one tensor", "src"),
        _form("all_reduce", "allreduce", "all_reduce", "one tensor", "one tensor"),
        _form("reduce", "reduce", "reduce", "one tensor", "one tensor at root", "dst"),
        _form("scan", "scan", "scan", "one tensor", "one tensor"),
        _form("exscan", "exscan", "exscan", "one tensor", "one tensor"),
        _form("all_gather", "allgather", "all_gather", "one tensor", "each tensor_list"),
        _form(
            *("all_gather_into_tensor", "allgather_into_tensor", "all_gather"),
            *("one input_tensor", "whole output_tensor"),
        ),
        _form("gather", "gather", "gather", "one tensor", "each gather_list at root", "dst"),
        _form("scatter", "scatter", "scatter", "each scatter_list at root", "one tensor", "src"),
        _form(
            *("reduce_scatter", "reduce_scatter", "reduce_scatter"),
            *("each input_list", "one output"),
        ),
        _form(
            *("reduce_scatter_tensor", "reduce_scatter_tensor", "reduce_scatter"),
            *("whole input", "one output"),
        ),
        _form(
            *("all_to_all", "alltoall", "all_to_all"),
            *("each input_tensor_list", "each output_tensor_list"),
        ),
        _form(
            *("all_to_all_single", "alltoall_single", "all_to_all"),
            *("whole input", "whole output"),
        ),
    )
}

#: Kinds with an input, or an output, for each rank (on the root, where there is one).
MANY_INPUTS: frozenset[Kind] = frozenset(
    form.kind for form in FORMS.values() if form.inputs.parts in ("each", "whole")
)
MANY_OUTPUTS: frozenset[Kind] = frozenset(
    form.kind for form in FORMS.values() if form.outputs.parts in ("each", "whole")
)
#: Kinds with a rank that is different from the others.
ROOTED: frozenset[Kind] = SCANS.union(form.kind for form in FORMS.values() if form.root)

#: A contiguous tensor, or N of them. In the place of N tensors, one tensor stands for N equal parts
#: in memory order.
Parts = Tensor | list[Tensor] | tuple[Tensor, ...]


@dataclass(slots=True)
class Operation:
    """The record of a call of a collective.

    A caller passes tensors as the operation's :class:`Form` says, and () for tensors that this rank
    does not have. An engine gets contiguous tensors instead, per kind (N = group size; the
    output of all_reduce may be the input):

    ==============  ======================  ===========================
    broadcast                               1 (the root's is the source)
    all_reduce      1                       1
    reduce          1                       1 at the root
    scan, exscan    1                       1 (an exscan leaves the root's as it is)
    all_gather      1                       N
    gather          1                       N at the root
    scatter         N at the root           1
    reduce_scatter  N                       1
    all_to_all      N                       N
    ==============  ======================  ===========================
    """

    kind: Kind
    inputs: Parts = ()
    outputs: Parts = ()
    #: The reduction; None for kinds that do not reduce.
    reduce_op: AnyReduceOp | None = None
    #: The group rank of the root; without meaning for kinds that are not in ROOTED.
    root: int = 0
    #: The limit in seconds, set before the engine gets the operation.
    timeout: float = 0.0
    #: The name of the public function; "": the same as the kind.
    title: str = ""
    #: Rows of dim 0 for each rank, if a tensor for all ranks is not divided equally.
    in_rows: Sequence[int] | None = None
    out_rows: Sequence[int] | None = None
    #: The caller's own time limit; None: the group's.
    limit: timedelta | None = None
    #: True to return before the operation is done.
    is_async: bool = False
    #: The provenance digest that all ranks must have in common; 0: none.
    provenance: int = 0
    #: The label of the caller's dtype and shape; see :mod:`.labels`.
    label: int = 0
    #: Stand-ins for non-contiguous outputs: (the user's tensor, a contiguous stand-in).
    copy_back: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def called(
        cls,
        name: str,
        inputs: Parts | None,
        outputs: Parts | None,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
    ) -> Operation:
        """The record of a call of the public function ``name``; None: this rank has no tensors."""
        given = () if inputs is None else inputs, () if outputs is None else outputs
        return cls(FORMS[name].kind, *given, reduce_op, root, title=name)

    @property
    def form(self) -> Form:
        """The row of the table."""
        return FORMS[self.title or self.kind]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all tensors; None for a barrier."""
        tensor = self._tensor()
        return None if tensor is None else tensor.dtype

    @property
    def device(self) -> torch.device | None:
        """The device of all tensors; None for a barrier."""
        tensor = self._tensor()
        return None if tensor is None else tensor.device

    def _tensor(self) -> Tensor | None:
        for parts in (self.outputs, self.inputs):
            if isinstance(parts, Tensor):
                return parts
            if parts:
                return parts[0]
        return None

    def tensors(self) -> list[Tensor]:
        """All tensors that the operation reads or writes, with those that are copied back."""
        inputs, outputs = self.inputs, self.outputs
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        tensors += [outputs] if isinstance(outputs, Tensor) else outputs
        if self.copy_back:
            tensors += [tensor for tensor, _ in self.copy_back]
        return tensors

    def summary(self) -> What:
        """The name, dtype, shapes and arguments, without the tensors; for the flight record."""
        in_place = self.kind in FORMS and FORMS[self.kind].in_place
        return (
            self.title or self.kind,
            self.dtype,
            () if in_place else shapes_of(self.inputs),
            shapes_of(self.outputs),
            self.reduce_op,
            self.root if self.kind in ROOTED else None,
        )

    def describe(self) -> str:
        """The name, dtype, shapes and arguments, for a person."""
        return describe(self.summary())


def is_absent(parts: Parts) -> bool:
    """True if ``parts`` stands for tensors that this rank does not have."""
    return isinstance(parts, (list, tuple)) and not parts


def split_parts(parts: Parts, size: int) -> list[Tensor]:
    """A flat tensor for each of ``size`` ranks: ``parts``, or equal parts of a single tensor."""
    if not isinstance(parts, Tensor):
        return [part.view(-1) for part in parts]
    return list(torch.tensor_split(parts.view(-1), size)) if size else []


def shapes_of(parts: Parts) -> Sequence[Sequence[int]]:
    """The shape of each tensor of ``parts``, which may be a single tensor."""
    return (parts.shape,) if isinstance(parts, Tensor) else [part.shape for part in parts]


def op_type(op: AnyReduceOp | None) -> str:
    """The reduction's name in lower case; "none" without a reduction."""
    if op is None:
        return "none"
    return str(op.value if isinstance(op, RedOpType) else op.type.value)


def op_factor(op: AnyReduceOp | None) -> float:
    """The factor of a PREMUL_SUM; 1 otherwise."""
    return 1.0 if op is None or isinstance(op, RedOpType) else op.factor
