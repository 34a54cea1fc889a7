"""The dim in which ranks' parts of a tensor are cut, followed through plain operators.

An operator's rule says which loop each dim runs over (:mod:`~tilework.tiled.factors`). Results that
run over the loop of a cut dim are cut, too. If no result does, or the operator needs all of the
dim, or moves elements along it, it would compute with this rank's elements alone, and is refused.
Sizes in a call may be those of the whole: the rule is asked with cut dims many times as long, and
the longer loop has to be the cut one. Operators without a rule are followed through the operators
that they call, or by which sizes grow. If these do not show the dim either, it stays unknown, and
nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.dtensor.propagation.dtensor_call import (
    Args,
    Kwargs,
    replicated_spec,
    tensors_in,
    unseen,
    with_tensors,
    without_override_checks,
)
from tilework.dtensor.propagation.op_sharding import (
    AskedCall,
    DTensorArg,
    PlacedCall,
    ask,
    carried_dims,
)
from tilework.mesh import DeviceMesh
from tilework.tiled import Decomposition, Dim, Factor, LocalCall, find, volume

#: A dim of a result, and whether ranks' parts follow each other there; None: unknown.
End = tuple[int, bool] | None
#: The number of ranks in calls that are only asked about: no size in a program has this factor.
_PRIME = 127
#: The most calls that a layer remembers.
_MOST_CALLS = 4096
#: Operators of dispatch modes, which also run in backward, and operators of libraries.
_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: The kinds of errors by which torch refuses a call.
_OF_TORCH = (RuntimeError, ValueError, IndexError, AssertionError)


class CutLayer:
    """A parallel module whose output is this rank's part of a tensor.

    Args:
        group: The ranks that have other parts.
        mesh: The mesh.
        axis: The axis of the mesh along which the ranks have other parts.
        name: The module's name and style, for errors.
        unmatched: Names of the plan that fit no module, for errors.

    Attributes:
        sizes: The sizes of the cut dim of the last output, the whole and this rank's.
        turns: The number of turns in which blocks of the dim are dealt.
    """

    def __init__(
        self, group: ProcessGroup, mesh: DeviceMesh, axis: int, name: str, unmatched: Sequence[str]
    ) -> None:
        self.group, self.mesh, self.axis, self.name = group, mesh, axis, name
        self.unmatched, self.sizes, self.turns = unmatched, (1, 1), 1
        self._cuts: dict[End, Cut] = {}
        #: For each call that was followed, the cuts of the results, or the error.
        self.calls: dict[Any, list[Cut] | str] = {}

    def cut(self, end: End) -> Cut:
        """The cut in a dim, counted from the end; the same object for the same argument."""
        return self._cuts.get(end) or self._cuts.setdefault(end, Cut(self, *(end or (None, True))))


class Cut:
    """The dim in which the part that a module gave is cut, counted from the end: -1 is the last.
    None: unknown.

    ``leads``: ranks' parts follow each other in the dim. Else the dim was merged behind others, and
    each rank has elements here and there.
    """

    __slots__ = ("dim", "layer", "leads")

    def __init__(self, layer: CutLayer, dim: int | None, leads: bool) -> None:
        self.layer, self.dim, self.leads = layer, dim, leads


class _CutDimNeededError(ValueError):
    """An operator reduces a cut dim, or needs all of it."""


@cache
def _is_elementwise(func: Any) -> bool:
    return find(func)[0].is_elementwise


def common(cuts: Iterable[Cut]) -> Cut:
    """The cut of the elementwise result of operands with these cuts."""
    first, *others = cuts
    for cut in others:
        if first.dim is None:
            first = cut
        elif cut.dim not in (None, first.dim):
            return first.layer.cut(None)
    return first


def cuts_of_results(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    results: list[Tensor],
    cuts: list[Cut],
    mark: Callable[..., Tensor],
) -> list[Cut]:
    """The cut of each tensor that an operator gave for parts with these cuts. Local.

    An argument that is a part has a :class:`Cut` as ``_cut``; ``mark`` makes a part of a tensor and
    a cut.

    Raises:
        ValueError: The operator reduces a cut dim, or needs all of it.
    """
    layer = cuts[0].layer
    if isinstance(func, _OPS):
        return [layer.cut(None)] * len(results)
    if _is_elementwise(func):
        return [common(cuts)] * len(results)
    calls = layer.calls
    key: Any = _key((func, *args, *kwargs.items()))
    try:
        found = calls.get(key)
    except TypeError:  # an argument without a hash
        key = found = None
    if found is None:
        try:
            with unseen(), torch.no_grad():
                found = _Call(func, args, kwargs, results).cuts(layer, mark)
        except _CutDimNeededError as error:
            found = str(error)
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        if key is not None:
            calls[key] = found
    if isinstance(found, str):
        raise _CutDimNeededError(found)
    return found


def of_the_part(error: Exception, func: Any, args: Args, kwargs: Kwargs) -> Exception:
    """The error for an operator on parts; it names the layer if the call fits the whole."""
    wholes, parts = [], []
    for each in tensors_in([*args, *kwargs.values()]):
        cut, sizes = cut_of(each), list(each.shape)
        if cut is not None and cut.dim is not None:
            whole, local = cut.layer.sizes
            sizes[cut.dim] = sizes[cut.dim] * whole // max(local, 1)
            at = cut.dim % len(sizes)
            parts.append((cut.layer, f"{each.shape[at]} of {sizes[at]} elements of dim {at}"))
        wholes.append(_stand_in(sizes, each.dtype))
    if not parts or isinstance(func, _OPS) or type(error) not in _OF_TORCH:
        return error
    if _shapes(func, args, kwargs, wholes) is None:  # not because of the cut
        return error
    layer, part = parts[0]
    names = ", ".join(map(repr, layer.unmatched))
    return type(error)(
        f"{func.__name__} got {part}, this rank's part of the output of {layer.name}\n"
        f"{error}\n"
        f"It would take the whole. Name the next layer in the plan, as RowwiseParallel(), or say "
        f"use_local_output=False or output_layouts=Replicate() for {layer.name}. A model that "
        f"counts heads or features reads the sizes from the tensor, as view(…, -1, head_dim) does."
        + (f" No module fits {names} of the plan." if names else "")
    )


def _shapes(
    func: Any, args: Args, kwargs: Kwargs, stand_ins: Iterable[Tensor]
) -> list[torch.Size] | None:
    """The shapes of the results with other tensors in the call; None: torch refuses them."""
    try:
        with unseen(), torch.no_grad():
            positional, named = with_tensors(args, kwargs, iter(stand_ins))
            return [each.shape for each in tensors_in(func(*positional, **named))]
    except Exception:
        return None


def _stand_in(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(sizes), dtype=dtype, device="meta")


def cut_of(tensor: Tensor) -> Cut | None:
    """The cut of a rank's part; None for a plain tensor."""
    return getattr(tensor, "_cut", None)


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    key: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is int:
            key.append(value)
        elif isinstance(value, Tensor):
            key += (value.shape, cut_of(value))
        elif kind is slice:
            key += (slice, value.start, value.stop, value.step)
        else:
            key.append(_key(value) if kind is tuple or kind is list else value)
    return tuple(key)


class _Call:
    """A call of an operator on tensors, of which some are parts."""

    def __init__(self, func: Any, args: Args, kwargs: Kwargs, results: list[Tensor]) -> None:
        self._func, self._args, self._kwargs, self._results = func, args, kwargs, results
        self._tensors = tensors_in([*args, *kwargs.values()])
        self._cuts = list(map(cut_of, self._tensors))
        self._rule: Any = None
        self._answer: Any = None

    def cuts(self, layer: CutLayer, mark: Callable[..., Tensor]) -> list[Cut]:
        """The cut of each result."""
        self.layer = layer
        self._entry = find(self._func)[0]
        self._parts = {
            at: cut.dim + self._tensors[at].dim()
            for at, cut in enumerate(self._cuts)
            if cut is not None and cut.dim is not None
        }
        # Sizes among the arguments may fit any number of ranks, as -1 does, or only the parts.
        found = self._by_rule(_PRIME)
        if found is None or not all(cut.leads for cut in found):
            found = self._by_rule(1) or found or self._within(mark)
        return found or self._grown() or [self.layer.cut(None)] * len(self._results)

    def _stand_ins(self, times: int) -> list[Tensor]:
        """The tensors without memory, with cut dims ``times`` as long."""
        found = []
        for at, tensor in enumerate(self._tensors):
            sizes = list(tensor.shape)
            if at in self._parts:
                sizes[self._parts[at]] *= times
            found.append(_stand_in(sizes, tensor.dtype))
        return found

    def _shapes(self, times: int) -> list[torch.Size] | None:
        return _shapes(self._func, self._args, self._kwargs, self._stand_ins(times))

    def _asked(self, times: int) -> AskedCall:
        """The call of these tensors, to ask rules about."""
        asked = [
            DTensorArg(at, replicated_spec(each, self.layer.mesh), each.dtype)
            for at, each in enumerate(self._stand_ins(times))
        ]
        return AskedCall(self._args, self._kwargs, asked)

    def _by_rule(self, times: int) -> list[Cut] | None:
        """The cuts of results with cut dims ``times`` as long; None if the rule gives none."""
        call = self._asked(times)
        self._rule, self._answer = ask(self._entry, call)
        cuts = [[self.layer.cut(None)] for _ in self._results]
        for at, dim in self._parts.items():
            ends = self._ends(call, at, dim, times)
            if ends is None or len(ends) != len(cuts):
                return None
            for of_result, end, result in zip(cuts, ends, self._results, strict=True):
                if end is not None and (times > 1 or self._is_certain(at, dim, end[0], result)):
                    of_result.append(self.layer.cut((end[0] - result.dim(), end[1])))
        return [common(of_result) for of_result in cuts]

    def _refuse(self, at: int, dim: int, times: int) -> None:
        """Raise unless the sizes in the call fit only parts, or the call asks a question."""
        are_shapes = times == 1 or len(self._parts) == len(self._tensors)
        asks = all(each.dtype is torch.bool for each in self._results)
        if not are_shapes or asks or self._tensors[at].shape[dim] * times == 1:
            return
        if times == 1 or self._shapes(times) is not None:
            raise self._refusal(at, dim)

    def _ends(self, call: AskedCall, at: int, dim: int, times: int) -> list[End] | None:
        """For each result, the dim in which the cut dim of the input ends up; None: unknown."""
        cut: Any = self._cuts[at]
        if isinstance(self._answer, PlacedCall):
            return self._ends_of_placed(call, at, dim, times)
        if not isinstance(self._answer, LocalCall) or not self._answer.fits(call.tensors):
            return None
        factor_map = self._answer.map
        factors = [each for each in factor_map.inputs[at][dim] if each.size != 1]
        factors = factors[:1] if cut.leads else factors
        if self._needs_all(factors, cut, times):
            if times == 1 or self._splits(at, dim):
                self._refuse(at, dim, times)
            return None
        if len(factors) > 1:
            return [None] * len(factor_map.outputs)
        return [_end(factors[0], of_result, cut.leads) for of_result in factor_map.outputs]

    def _ends_of_placed(self, call: AskedCall, at: int, dim: int, times: int) -> list[End] | None:
        """:meth:`_ends` for a rule with layouts, which show the elements of each rank."""
        axis, cut = self.layer.axis, cast(Cut, self._cuts[at])
        if times > 1:
            times = self.layer.mesh.shape[axis]
            call = self._asked(times)
        carried = carried_dims(self._rule, call, at, dim, axis)
        if carried is None or len(carried) != len(self._results):
            self._refuse(at, dim, times)
            return None
        for (to, sizes), result in zip(carried, self._results, strict=True):
            if times > 1 and sizes != [result.shape[to]] * times:
                self._refuse(at, dim, times)
        return [(to, cut.leads) for to, _ in carried]

    def _needs_all(self, factors: list[Factor], cut: Cut, times: int) -> bool:
        """True if the operator needs all of a cut dim, or reduces it."""
        assert isinstance(self._answer, LocalCall)
        reduces = self._answer.map.reduces
        return (
            not factors
            or any(each.unshardable or reduces(each) for each in factors)
            or bool(cut.leads and times > 1 and factors[0].size % times)
        )

    def _splits(self, at: int, dim: int) -> bool:
        """True if sizes of a view may be those of the whole, so that the cut dim is split."""
        if not self._entry.is_view or self._tensors[at].shape[dim] == 1:
            return not self._entry.is_view
        answer = ask(self._entry, self._asked(1))[1]
        assert isinstance(answer, LocalCall)
        factors = [each for each in answer.map.inputs[at][dim] if each.size != 1]
        dims = answer.map.outputs[0]
        ends = [to for to, of_dim in enumerate(dims) if factors[0] in of_dim]
        if len(factors) > 1 or len(self._results) > 1 or not ends:
            return True
        return any(volume(of_dim) == 1 for of_dim in dims[ends[0] + 1 : ends[0] + 2])

    def _is_certain(self, at: int, dim: int, to: int, result: Tensor) -> bool:
        """False if the dim of one element before dim ``to`` of a view may be the cut dim."""
        if not self._entry.is_view or not to or result.shape[to - 1] != 1:
            return True
        return self._tensors[at].shape[:dim] == result.shape[:to]

    def _within(self, mark: Callable[..., Tensor]) -> list[Cut] | None:
        """The cuts of results by the operators that compute them; None: unknown."""
        body = self._body()
        if body is None:
            return None
        stand_ins = [_stand_in(each.shape, each.dtype) for each in self._tensors]
        for stand_in, cut in zip(stand_ins, self._cuts, strict=True):
            if cut is not None:
                mark(stand_in, cut)
        args, kwargs = with_tensors(self._args, self._kwargs, iter(stand_ins))
        try:
            with torch._C._EnableTorchFunction():
                cuts = list(map(cut_of, tensors_in(body(*args, **kwargs))))
        except _CutDimNeededError:
            raise self._refusal(*next(iter(self._parts.items()))) from None
        except Exception:  # it needs values
            return None
        found = [cut for cut in cuts if cut is not None]
        return found if len(found) == len(cuts) == len(self._results) else None

    def _body(self) -> Callable[..., Any] | None:
        """The function that computes results by other operators, if there is one."""
        handler = self._entry.dtensor_handler
        if handler is not None and self._entry.name.endswith(".__get__"):
            return lambda *args, **kwargs: handler(self._func, args, kwargs)
        if isinstance(self._answer, Decomposition):
            return None if self._entry.draws else self._answer.run
        return without_override_checks(self._func) if self._answer is None else None

    def _grown(self) -> list[Cut] | None:
        """The cuts of results by the dims that are longer if cut dims are; None: unknown."""
        shapes = self._shapes(_PRIME)
        if shapes is None or len(shapes) != len(self._results) or not self._parts:
            return None
        found = []
        for whole, result in zip(shapes, self._results, strict=True):
            sizes = zip(whole, result.shape, strict=True)
            dims = [dim - result.dim() for dim, (n, local) in enumerate(sizes) if n != local]
            if not dims:
                self._refuse(*next(iter(self._parts.items())), 1)
            found.append(self.layer.cut((dims[0], True) if len(dims) == 1 else None))
        return found

    def _refusal(self, at: int, dim: int) -> _CutDimNeededError:
        name, layer = self._entry.name, self.layer.name
        size = self._tensors[at].shape[dim]
        return _CutDimNeededError(
            f"{name} needs all of dim {dim}, and {layer} gave this rank {size} elements of it.\n"
            f"The result would depend on the number of ranks. Say use_local_output=False for that "
            f"layer: then the output is a DTensor, and {name} takes all of it. Or shard another "
            f"dim. If this rank's elements alone are meant, pass part.as_subclass(torch.Tensor)."
            + (" A view of heads takes their number as -1." if self._entry.is_view else "")
        )


def _end(factor: Factor, dims: Sequence[Dim], leads: bool) -> End:
    """The dim with a factor, and True if ranks' parts follow each other there; None: no dim."""
    for number, dim in enumerate(dims):
        if factor in dim:
            return number, leads and next(each for each in dim if each.size != 1) is factor
    return None
