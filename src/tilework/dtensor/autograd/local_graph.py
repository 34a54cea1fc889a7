"""Local tensors at their places in the graph, also behind a user's own autograd.Function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from tilework.dtensor.base import DTensorBase, Place, base_in_graph, wrap_as
from tilework.dtensor.local_function import LocalFunction, torch_apply
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import Moved, call_counts_of, digest_of, plain_or_digest
from tilework.dtensor.redistribution.redistribute import (
    Adjoint,
    counted_once,
    pull_back,
    redistribute_local,
)
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.places import (
    check_unwritten,
    holders,
    is_written_since,
    leave_graph_of_wrappers,
    note_taken,
    show_as,
)


def as_seen(grad: Tensor, spec: DTensorSpec, before: Tensor | None = None) -> Tensor:
    """The local gradient from the graph, in the same memory, to be counted once. Local.

    It is returned as it is if the tensor, of layout ``spec``, is no partial sum, or if it is not
    differentiated further. ``before`` is the gradient that the program saw earlier, if backward
    passes have only added to that since: this term is counted already.
    """
    if not grad.requires_grad or spec.reduce_op != "sum":
        return grad
    with torch.inference_mode(False), torch.enable_grad():
        if before is None or not before.requires_grad:
            return counted_once(grad, spec.dual, spec.partial_axes)
        seen: Tensor = _Seen.apply(grad, before, spec)
    return seen


class _Seen(LocalFunction):
    """The identity on a sum; backward ignores the term ``before``, which is counted already."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, before: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dual = ctx.spec.dual
        counted = redistribute_local(grad, dual, dual.as_partial(ctx.spec.partial_axes))
        return counted, grad - counted, None  # the term is part of the sum, too


_WithoutInterception = torch._C.DisableTorchFunctionSubclass
_base: Any = torch._C.TensorBase
_flag_of = _base.requires_grad.__get__
_grad_fn_of = _base.grad_fn.__get__
_grad_of = _base.grad.__get__
_output_number = _base.output_nr.__get__
#: True if the backward pass under way keeps the graph.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def local_of(tensor: DTensorBase) -> Tensor:
    """The local tensor, at the tensor's place in the graph."""
    if tensor._view_of is not None:
        moved_views.check_fresh(tensor)
    local = tensor._local_tensor
    if tensor._made_without_grad and not local.requires_grad and torch.is_grad_enabled():
        return _linked(tensor)
    return local


def in_graph(tensor: DTensorBase) -> Tensor:
    """The local tensor at the tensor's place in the graph, even if no gradients are recorded."""
    if not tensor._made_without_grad or torch.is_grad_enabled():
        return local_of(tensor)
    with torch.inference_mode(False), torch.enable_grad():
        return local_of(tensor)


def mirror_requires_grad(tensor: DTensorBase) -> None:
    """Give the wrapper the local tensor's ``requires_grad``, for a user's own Function to see."""
    with _WithoutInterception():
        if _flag_of(tensor) != tensor._local_tensor.requires_grad and _grad_fn_of(tensor) is None:
            _base.requires_grad_(tensor, tensor._local_tensor.requires_grad)


def wrote(tensor: DTensorBase, by: str) -> None:
    """As ``moved_views.wrote``, for a write that the graph may have recorded."""
    if not tensor._local_tensor.requires_grad:
        moved_views.wrote(tensor, by)
        return
    mirror_requires_grad(tensor)
    moved_views.wrote(tensor, by)
    base = base_in_graph(tensor)
    while base is not None:
        mirror_requires_grad(base)
        base = base_in_graph(base)


def as_leaf(tensor: DTensorBase) -> DTensorBase:
    """The tensor, linked, if it is a leaf of the wrappers' graph; else a view that is a leaf."""
    local_of(tensor)
    if not torch.is_grad_enabled():
        return tensor
    with _WithoutInterception():
        is_leaf = _grad_fn_of(tensor) is None
    return tensor if is_leaf else tensor.view_as(tensor)  # type: ignore[return-value]


def grad_fn_of(tensor: DTensorBase) -> Any:
    """The tensor's ``grad_fn``: a user's own Function, or the node of the local tensor."""
    with _WithoutInterception():
        node = _grad_fn_of(tensor)
    if node is not None:
        return node
    local = in_graph(tensor)
    node = local.grad_fn
    return node.results[local.output_nr].edge.node if isinstance(node, _LINK) else node


def _linked(tensor: DTensorBase) -> Tensor:
    """The local tensor of a user's Function's result, linked to the Function in the graph."""
    with _WithoutInterception():
        node = _grad_fn_of(tensor)
        is_made_leaf = node is None and _flag_of(tensor)
    if is_made_leaf:  # of an input of a nested checkpoint that recomputes
        tensor._local_tensor.requires_grad_()
    if node is None:
        return tensor._local_tensor
    _link([tensor], node)
    return tensor._local_tensor


def link_results(results: Sequence[Any]) -> None:
    """Link the results of a call of a user's own Function: backward runs once for all. Local."""
    tensors = [each for each in results if isinstance(each, DTensorBase)]
    if not tensors or not torch.is_grad_enabled():
        return
    by_node: dict[Any, list[DTensorBase]] = {}
    with _WithoutInterception():
        for each in dict.fromkeys(tensors):
            node = _grad_fn_of(each)
            if node is not None and not each._local_tensor.requires_grad:
                by_node.setdefault(node, []).append(each)
    for node, made in by_node.items():
        _link(made, node)


def _link(results: Sequence[DTensorBase], node: Any) -> None:
    places, functions = _places(node)
    links = _Link.apply(  # type: ignore[no-untyped-call]
        [_result(each, node) for each in results],
        functions,
        places,
        *[each._local_tensor for each in results],
        *[place.local for place in places.values()],
    )
    for each, link in zip(results, links, strict=True):
        moved_views.replace_local(each, link)
        if holders(each) == 1:  # what a checkpoint has saved must not be detached
            leave_graph_of_wrappers(each)


def _result(tensor: DTensorBase, node: Any) -> _Result:
    with _WithoutInterception():
        # It keeps the node in memory when the tensor leaves the graph.
        following = torch_apply.__get__(None, _Following)(tensor)
        edge = torch.autograd.graph.GradientEdge(node, _output_number(tensor))
    return _Result(edge, following, type(tensor), tensor._spec)


class _Result(NamedTuple):
    """The edge and layout of a user's Function's result; ``following`` keeps the node alive."""

    edge: torch.autograd.graph.GradientEdge
    following: Tensor
    #: The class of the result, and of the gradient that goes back into the wrappers' graph.
    kind: type[DTensorBase]
    spec: DTensorSpec


def _places(node: Any) -> tuple[dict[DTensorBase, Place], list[Any]]:
    """The places of the leaves that a node was computed from, and the nodes on the way."""
    places: dict[DTensorBase, Place] = {}
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for next_node, _ in node.next_functions:
            leaf = getattr(next_node, "variable", None)
            if isinstance(leaf, DTensorBase):
                if is_written_since(leaf, node):  # by a Function.apply that bypasses the wrapper
                    raise RuntimeError(
                        f"{leaf!r} was written to between the call of {node.name()}, which took "
                        f"it, and the first use of the result: pass a clone() to the Function"
                    )
                places[leaf] = Place(local_of(leaf), leaf._spec)
            elif next_node is not None:
                todo.append(next_node)
    return places, [node for node in seen if not hasattr(node, "variable")]


class _Following(torch.autograd.Function):
    """A tensor without elements that follows another in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)


class _Link(torch.autograd.Function):
    """The identity, whose backward crosses into the wrappers' graph and returns at the leaves."""

    @staticmethod
    def forward(
        ctx: Any,
        results: Sequence[_Result],
        nodes: Sequence[Any],
        leaves: dict[DTensorBase, Place],
        *locals_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.results, ctx.nodes, ctx.leaves = results, nodes, leaves
        ctx.ways = [WayBack(place) for place in leaves.values()]
        ctx.is_passed = False
        ctx.set_materialize_grads(False)
        return tuple(local.detach() for local in locals_[: len(results)])

    @staticmethod
    def backward(ctx: Any, *result_grads: Tensor | None) -> Any:
        results: Sequence[_Result] = ctx.results
        for node in ctx.nodes:
            check_unwritten(node)
        check_kept(ctx)
        roots = {
            result.edge: wrap_as(result.kind, as_seen(grad, result.spec), result.spec.grad_spec)
            for result, grad in zip(results, result_grads, strict=True)
            if grad is not None
        }
        changed = [leaf for leaf, place in ctx.leaves.items() if leaf._spec is not place.spec]
        for leaf in changed:
            _show(leaf, ctx.leaves[leaf])
        with _WithoutInterception():
            for leaf in ctx.leaves:  # leaves that left the graph since get gradients, too
                _base.requires_grad_(leaf)
        try:
            leaf_grads = _passed(roots, list(ctx.leaves))
        finally:
            for leaf in ctx.leaves:
                mirror_requires_grad(leaf)
            for leaf in changed:
                _show(leaf, Place(leaf._local_tensor, leaf._spec))
        for leaf, leaf_grad in zip(ctx.leaves, leaf_grads, strict=True):
            if leaf_grad is not None:  # computed by a function of the program's own
                call_counts_of(leaf._spec.mesh).note_gradient(plain_or_digest(leaf_grad))
        grads = [
            None if grad is None else way.take(grad, "the gradient")
            for grad, way in zip(leaf_grads, ctx.ways, strict=True)
        ]
        return None, None, None, *[None for _ in results], *grads


def _passed(
    roots: dict[torch.autograd.graph.GradientEdge, DTensorBase], leaves: Sequence[DTensorBase]
) -> Sequence[Tensor | None]:
    """The gradients of ``leaves`` after a backward pass from ``roots`` through the wrappers."""
    engine: Any = torch.autograd.Variable._execution_engine
    if torch.is_grad_enabled():  # to be differentiated further
        grads: Sequence[Tensor | None] = engine.run_backward(
            tuple(roots), tuple(roots.values()), True, True, tuple(leaves), allow_unreachable=True
        )
        return grads
    # Reentrant checkpoints want gradients to be accumulated.
    engine.run_backward(
        tuple(roots),
        tuple(roots.values()),
        True,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    with _WithoutInterception():
        accumulated = [_grad_of(leaf) for leaf in leaves]
        for leaf in leaves:
            _base.grad.__set__(leaf, None)
    return accumulated


def _show(tensor: DTensorBase, place: Place) -> None:
    """Give the wrapper that torch's C++ code sees the shape that the tensor had at a place."""
    show_as(tensor, wrap_as(type(tensor), place.local.detach(), place.spec))


#: The class of the nodes of ``_Link``.
_LINK: Any = _Link._backward_cls


def local_as(tensor: Tensor, spec: DTensorSpec, what: str) -> Tensor:
    """The local tensor in the layout ``spec``; a plain tensor counts as replicated. Collective."""
    if not isinstance(tensor, DTensorBase):
        return redistribute_local(
            tensor, spec.replicated, spec, of=Moved(content_digest(tensor), what)
        )
    if tensor._spec.mesh != spec.mesh:
        raise ValueError(
            f"{what} lies on {tensor._spec.mesh}, the tensor on {spec.mesh}: they must be on the "
            f"same mesh"
        )
    of = Moved(digest_of(tensor), what)
    return redistribute_local(local_of(tensor), tensor._spec, spec, of=of)


def check_kept(ctx: Any) -> None:
    """Refuse a second backward pass, as torch does, unless the first pass kept the graph.

    The wrappers' graph itself is always kept, for other results of the Functions. Functions that
    saved no tensors may run again.
    """
    if ctx.is_passed and any(getattr(node, "saved_tensors", ()) for node in ctx.nodes):
        raise RuntimeError(
            "Trying to backward through the graph a second time, and an autograd.Function of your "
            "own has saved tensors there: pass retain_graph=True to the first backward()"
        )
    ctx.is_passed = not _keeps_graph()


class WayBack:
    """Converts gradients that the program gives, in any layout, to local gradients at a place in
    the graph.

    In the graph each rank's value has a share of the gradient. At a leaf the shares are only added
    up, and any shares that add up to the gradient are right.
    """

    __slots__ = ("adjoint", "spec", "value")

    def __init__(self, place: Place) -> None:
        self.spec = spec = place.spec
        self.adjoint = self.value = None
        if spec.partial_axes and not (place.local.is_leaf and spec.reduce_op != "sum"):
            self.adjoint = Adjoint(spec, spec.dual)
            if self.adjoint.nonlinear:  # shares depend on what a rank holds, and may write to
                self.value = place.local.detach().clone()

    def take(self, grad: Tensor, what: str) -> Tensor:
        """The local gradient at the place, from any form of it (``what`` in errors). Collective."""
        if self.adjoint is None:
            return local_as(grad, self.spec.grad_spec, what)
        whole = local_as(grad, self.spec.dual, what)
        return pull_back(self.adjoint, whole, self.value, Moved(plain_or_digest(grad), what))


def plain(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; other tensors as they are."""
    return local_of(tensor) if isinstance(tensor, DTensorBase) else tensor


#: In torch's error for a Function that writes to a leaf in place.
_LEAF_WRITTEN = "a leaf Variable that requires grad has been used in an in-place operation"


def linking(original: Any) -> Any:
    """A replacement of the classmethod ``apply`` that links DTensors among the results."""

    @functools.wraps(getattr(original, "__func__", original))
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple([_as_leaf(arg) for arg in args])
        kwargs = {name: _as_leaf(arg) for name, arg in kwargs.items()}
        try:
            results = original.__get__(None, cls)(*args, **kwargs)
        except RuntimeError as error:
            if _LEAF_WRITTEN not in str(error) or not any(map(_is_computed, args)):
                raise
            raise RuntimeError(
                f"{cls.__name__} calls mark_dirty() on a DTensor that was computed by operators. "
                f"torch takes that DTensor for a leaf, and refuses the write: return a new tensor "
                f"instead, or apply {cls.__name__} to to_local()"
            ) from error
        link_results(results if results.__class__ is tuple else (results,))
        return results

    return classmethod(apply)


def _is_computed(arg: Any) -> bool:
    return isinstance(arg, DTensorBase) and not arg.is_leaf


def _as_leaf(arg: Any) -> Any:
    if isinstance(arg, DTensorBase):
        if arg._viewed is not None:  # what it shows may have entered the graph since
            local_of(arg)
            mirror_requires_grad(arg)
        note_taken(arg)
    is_result = isinstance(arg, DTensorBase) and arg._made_without_grad
    return as_leaf(arg) if is_result else arg


_function: Any = torch.autograd.Function
_function.apply = linking(torch_apply)


def noting_saved(original: Any) -> Any:
    """A replacement of a checkpoint's ``save_inputs`` that notes which DTensors C++ saves.

    torch compares the versions of saved tensors later: writes to them must be counted.
    """

    @functools.wraps(original)
    def save_inputs(frame: Any, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, DTensorBase):
                note_taken(arg)
        return original(frame, *args)

    return save_inputs


# Torch before 2.13 saves them by a Function, which the above takes in.
_frame: Any = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
if hasattr(_frame, "save_inputs"):
    _frame.save_inputs = noting_saved(_frame.save_inputs)
