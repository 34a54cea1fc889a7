"""Gradients of DTensors: ``grad``, ``data``, ``backward``, hooks and ``torch.autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tilework.dtensor.autograd.expanded_grads import watching
from tilework.dtensor.autograd.local_graph import WayBack, as_seen, in_graph, local_as, local_of
from tilework.dtensor.autograd.partial_grads import alias, alias_local
from tilework.dtensor.base import (
    APART,
    DTensorBase,
    Memory,
    Place,
    base_in_graph,
    deferred_grad,
    grads_of,
    is_moved,
    memory_of,
    own_memory,
    wrap_as,
)
from tilework.dtensor.provenance.digests import (
    Moved,
    call_counts_of,
    digest_of,
    note_write,
    plain_or_digest,
    seeds_in,
)
from tilework.dtensor.redistribution.redistribute import redistribute_local, with_redistributed_grad
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import offset_of
from tilework.dtensor.views.places import holders, living, show_as
from tilework.layout import Placement


def local_with_grad(tensor: DTensorBase, placements: Sequence[Placement]) -> Tensor:
    """The local tensor, for local operators whose gradient of it will have these placements."""
    spec = tensor._spec
    incoming = spec_of(spec.mesh, placements, spec.shape, spec.order)
    local = local_of(tensor)
    if incoming == spec.dual or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    if incoming.local_shape != spec.local_shape or incoming.dual != spec.dual:
        raise ValueError(
            f"the gradient of a tensor with placements {list(spec.placements)} cannot have the "
            f"placements {list(placements)}: Partial() may stand where the tensor is replicated, "
            f"nothing else"
        )
    return alias(tensor, incoming.partial_axes)


def entering(local: Tensor, spec: DTensorSpec, placements: Sequence[Placement] | None) -> Tensor:
    """The local tensor of a new DTensor of this layout, in the memory of ``local``.

    A leaf stays a leaf: the result is computed from it, and may be written to in place. For torch
    the result is not a view, since torch forbids writes to views of leaves. The gradient of
    ``local`` is redistributed to ``placements``, unless None.
    """
    incoming = spec.dual
    outgoing = incoming
    if placements is not None:
        outgoing = spec_of(spec.mesh, placements, spec.shape, spec.order)
        if outgoing.local_shape != spec.local_shape:
            raise ValueError(
                f"the gradient of a local tensor of shape {list(spec.local_shape)} cannot have the "
                f"placements {list(placements)}, where it has shape {list(outgoing.local_shape)}"
            )
        if outgoing != incoming and spec.reduce_op not in (None, "sum"):
            raise ValueError(
                f"each rank has its own gradient of a tensor with placements "
                f"{list(spec.placements)}: grad_placements cannot change it"
            )
    if not local.requires_grad and local._is_view():
        # A later write would enter the history of the base, on this rank alone.
        return local.detach()
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    if outgoing == incoming and not local.is_leaf:
        return local
    return with_redistributed_grad(local, incoming, outgoing)


def set_grad(tensor: DTensorBase, value: Tensor) -> None:
    """Make ``value`` the tensor's gradient."""
    grads_of(tensor).shown = None
    refuse_torch_dtensor(value, "the gradient of a DTensor")
    if not isinstance(value, DTensorBase):
        raise TypeError(
            f"the gradient of a DTensor is a DTensor, got {type(value).__name__}: distribute it "
            f"with distribute_tensor(grad, mesh, placements)"
        )
    if value.shape != tensor.shape:
        raise RuntimeError(
            f"a gradient must have the tensor's shape, {list(tensor.shape)}, got "
            f"{list(value.shape)}"
        )
    spec = tensor._spec.grad_spec
    local = local_as(value, spec, "the gradient")
    grad = value
    if value._spec != spec:
        grad = wrap_as(type(tensor), local, spec, hash((digest_of(value), spec.digest)))
        if not local.requires_grad:
            moved_views.mark(grad, value.detach(), _placed_as(spec), _write_placed)  # type: ignore[arg-type]
    tensor._local_tensor.grad = grad._local_tensor
    grads_of(tensor).shown = grad


def _placed_as(spec: DTensorSpec) -> Callable[[Any], Any]:
    """A function that copies a tensor, redistributed to the placements and order of ``spec``."""
    return lambda x: x.redistribute(placements=spec.placements, order=spec.order).clone()


def _write_placed(base: DTensorBase, value: DTensorBase) -> None:
    base.copy_(value)


def set_data(tensor: DTensorBase, value: Tensor) -> None:
    """Give the tensor the memory and layout of another, as ``tensor.data = value`` does."""
    refuse_torch_dtensor(value, "the data of a DTensor")
    if not isinstance(value, DTensorBase):
        raise TypeError(
            f"a DTensor's data is a DTensor, got {type(value).__name__}: distribute it first"
        )
    if _is_all_of(value, tensor):
        return
    grads_of(tensor).aliases = {}  # which are in the graph, and would pass for a use
    used = _is_in_graph(tensor)
    _check_may_get_data(tensor, value, used)
    digest, start = digest_of(value), offset_of(value)
    shown = local_of(value).data
    _keep_base(tensor, value)
    before, given, shows = own_memory(tensor), memory_of(value), own_memory(value).shows
    _leave_memory(tensor)
    tensor._memory = Memory(given, shows).counting_on(before)
    _set_local_data(tensor, shown, value._spec)
    tensor._spec = value._spec.copy()
    grads_of(tensor).forget()
    note_write(tensor, digest)
    moved_views.share_memory(tensor, value, start)
    show_shape(tensor)


def _keep_base(tensor: DTensorBase, value: DTensorBase) -> None:
    """Before ``value`` becomes the data of ``tensor``, let copies in it refer to another base."""
    while is_moved(value):
        shown: Any = own_memory(value).shows
        if shown.base is tensor:
            shown.base = tensor.detach()
        value = shown.base


def _leave_memory(tensor: DTensorBase) -> None:
    """Make a tensor that is about to get other memory no view. Local."""
    tensor._view_of = tensor._viewed = tensor._made = None


def show_shape(tensor: DTensorBase) -> None:
    """Give the wrapper that torch's C++ code sees the shape that the tensor has now."""
    with torch.inference_mode(False):
        show_as(tensor, wrap_as(type(tensor), tensor._local_tensor.detach(), tensor._spec))


def check_no_leaf(tensor: DTensorBase) -> None:
    """Raise for a leaf that requires a gradient, or a view of it, unless under ``no_grad``."""
    if not torch.is_grad_enabled():
        return
    graded = tensor.requires_grad
    base: DTensorBase | None = tensor
    while base is not None:
        if base.is_leaf and (base.requires_grad or (graded and base is not tensor)):
            which = "a leaf" if base is tensor else "a view of a leaf"
            raise RuntimeError(
                f"{which} Variable that requires grad is being used in an in-place operation."
            )
        base = base_in_graph(base)


def _check_may_get_data(tensor: DTensorBase, value: DTensorBase, used: bool) -> None:
    """Refuse ``tensor.data = value`` that mixes gradients of old and new elements."""
    if moved_views.is_view(tensor):
        raise RuntimeError(
            f"{tensor!r} is a view, and cannot be given other data: torch's graph would still take "
            f"it for a view. Make it a tensor of its own first, v = v.detach(), or write to it, "
            f"v.copy_(y)"
        )
    if not tensor.requires_grad or tensor._spec == value._spec:
        return
    if not tensor.is_leaf:
        raise RuntimeError(
            f"{tensor!r} was computed from tensors that require a gradient, and cannot be given "
            f"data of another layout, {value!r}: redistribute the new data to the tensor's layout "
            f"first, or write x = y"
        )
    if used:
        raise RuntimeError(
            f"{tensor!r} was used, and cannot be given data of another layout, {value!r}, while "
            f"results wait for gradients: call backward first and drop them, redistribute the new "
            f"data to the tensor's layout, or call detach_().requires_grad_() on the tensor"
        )
    if tensor.shape != value.shape and tensor._local_tensor.grad is not None:
        raise RuntimeError(
            f"{tensor!r} has a gradient, and cannot be given data of shape {list(value.shape)}: "
            f"clear it first, x.grad = None"
        )


def _is_in_graph(tensor: DTensorBase) -> bool:
    """True if a result that was computed from a tensor still waits for a gradient. Local."""
    local = tensor._local_tensor
    if not local.requires_grad or local.is_inference():
        return False
    if not local.is_leaf:
        return True
    before = holders(local)
    with torch.inference_mode(False), torch.enable_grad():
        edge = torch.autograd.graph.get_gradient_edge(local)
    # The tensor's node holds the tensor. A node that is new here adds a holder.
    is_known = holders(local) == before
    del edge
    return is_known


def _set_local_data(tensor: DTensorBase, data: Tensor, spec: DTensorSpec) -> None:
    """Give a tensor's local tensor other data. Collective if a gradient gets another layout."""
    local, before = tensor._local_tensor, tensor._spec
    if local.is_leaf and local.grad is not None and before != spec and before.mesh == spec.mesh:
        of = Moved(digest_of(tensor), "data")
        grad = redistribute_local(local.grad, before.grad_spec, spec.grad_spec, of=of)
        local.grad = None
        local.data = grad.new_empty(()).expand(grad.shape)  # of the dtype and shape of before
        local.grad = grad
    local.data = data


def seen_grad(tensor: DTensorBase, grad: Tensor) -> Tensor:
    """The local gradient of a tensor as the program sees it, and as the tensor keeps it."""
    if not grad.requires_grad:
        return grad
    shown = grads_of(tensor).shown
    known = None if shown is None else shown._local_tensor
    if grad is not known:
        grad = tensor._local_tensor.grad = as_seen(grad, tensor._spec, known)
    return grad


def _is_all_of(value: DTensorBase, tensor: DTensorBase) -> bool:
    """True if ``value`` is ``tensor``, or shows all of it, as ``data`` and ``detach()`` do."""
    while value is not tensor:
        viewed = value._viewed
        if viewed is None or viewed[0]._spec is not viewed[1]:
            return False
        if viewed[2] is not None and viewed[2] not in APART:
            return False
        value = viewed[0]
    return True


def set_memory(tensor: DTensorBase, *source: Any) -> None:
    """Give the tensor the memory and layout of another, as ``tensor.set_(source)`` does."""
    for each in source:
        refuse_torch_dtensor(each, "set_()")
    if len(source) != 1 or not isinstance(source[0], DTensorBase):
        raise TypeError(
            f"set_() of a DTensor takes another DTensor, whose memory it shows from then on, got "
            f"{', '.join(type(each).__name__ for each in source) or 'nothing'}: memory of several "
            f"ranks has no storage. x.copy_(y) takes values only"
        )
    check_no_leaf(tensor)
    if source[0].dtype != tensor.dtype:
        raise RuntimeError(
            f"set_() got a tensor of {source[0].dtype} for one of {tensor.dtype}: convert it first"
        )
    if torch.is_grad_enabled() and (tensor.requires_grad or source[0].requires_grad):
        raise RuntimeError("set_() has no gradient: call it under no_grad(), or x.data = y")
    set_data(tensor, source[0])
    if tensor.requires_grad:  # torch counts it as a write, unlike x.data = y
        torch.autograd.graph.increment_version(tensor._local_tensor)


def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward`` where some of the tensors are DTensors."""
    outs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if inputs is not None:
        leaves = [inputs] if isinstance(inputs, Tensor) else inputs
        inputs = [_place_of(leaf)[0] for leaf in leaves]
    grads = grad_tensors if grad_variables is None else grad_variables
    pairs = _roots(outs, grads)
    if not pairs:
        return
    with watching(inputs or ()), _Pass(outs, grads, accumulates=True):
        torch.autograd.backward(
            [root for root, _ in pairs],
            [grad for _, grad in pairs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=inputs,
        )


class _Pass:
    """A context for a backward pass, whose gradients get a digest of the pass's start."""

    __slots__ = ("accumulates", "before", "counts", "digest")

    def __init__(self, outs: Sequence[Tensor], grads: Any, accumulates: bool) -> None:
        seeds = [digest_of(out) for out in outs if isinstance(out, DTensorBase)]
        self.digest = hash(tuple(seeds if grads is None else seeds_in(grads, seeds)))
        mesh = next((out._spec.mesh for out in outs if isinstance(out, DTensorBase)), None)
        self.counts = None if mesh is None else call_counts_of(mesh)
        self.accumulates = accumulates

    def __enter__(self) -> int:
        if self.counts is not None:
            self.before, self.counts.passing = self.counts.passing, self.digest
        return self.digest

    def __exit__(self, *_: object) -> None:
        if self.counts is not None:
            self.counts.passing = self.before
            if self.accumulates:
                self.counts.note_gradient(self.digest)


def _roots(outs: Sequence[Tensor], grads: Any) -> list[tuple[Tensor, Tensor | None]]:
    """The local tensors where a backward pass starts, with gradients; none on ranks outside."""
    grads = [grads] if isinstance(grads, Tensor) else grads or [None] * len(outs)
    if len(grads) < len(outs):
        raise RuntimeError(f"got {len(outs)} tensors and {len(grads)} gradients: pass one for each")
    return [
        gradient_root(out, grad) if isinstance(out, DTensorBase) else (out, grad)
        for out, grad in zip(outs, grads, strict=False)  # torch ignores further gradients, too
        if not isinstance(out, DTensorBase) or out._spec.takes_part
    ]


def gradient_root(tensor: DTensorBase, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """The local tensor at which a backward pass starts, and the gradient there (None: 1)."""
    spec = tensor._spec
    local = local_of(tensor)
    if spec.reduce_op not in (None, "sum"):
        of = Moved(digest_of(tensor), "backward")
        with torch.enable_grad():  # as inside of another backward pass, that of a checkpoint
            local = redistribute_local(local, spec, spec.dual, of=of)
    if gradient is not None:
        if not isinstance(gradient, Tensor):
            raise TypeError(
                f"gradients can be either Tensors or None, but got {type(gradient).__name__}"
            )
        refuse_torch_dtensor(gradient, "the backward pass")
        if gradient.shape != tensor.shape:
            raise RuntimeError(
                f"a gradient must have the tensor's shape, {list(tensor.shape)}, got "
                f"{list(gradient.shape)}"
            )
        grad = local_as(gradient, spec.dual, "the gradient")
        if spec.partial_axes and spec.reduce_op == "sum" and grad.requires_grad:
            of = Moved(digest_of(tensor))
            grad = alias_local(grad, spec.dual.as_partial(spec.partial_axes), spec.dual, of)
        return local, grad
    if spec.size.numel() != 1:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs: this tensor has shape "
            f"{list(tensor.shape)}, so pass its gradient"
        )
    if not tensor.dtype.is_floating_point and local.requires_grad:
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs but got {tensor.dtype}: "
            f"pass its gradient, or that of its real part"
        )
    return local, torch.ones_like(local, requires_grad=False)


def register_hook(tensor: DTensorBase, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook on a tensor's gradient, and return the handle: ``DTensor.register_hook``."""
    if (reduce := deferred_grad(tensor)) is not None:  # of passes before: not for this hook
        reduce()
    local: Any = in_graph(tensor)
    _ = tensor._spec.grad_spec  # raises for what has none
    # The graph holds the hook: if that held the tensor, neither would ever be freed.
    kind, leaf = type(tensor), [ref(tensor)] if local.is_leaf else []
    then = WayBack(Place(local, tensor._spec)), digest_of(tensor)

    def called(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # the node gave only other inputs gradients
            return None
        way, digest = then
        # A leaf's gradient has the layout of the leaf now; otherwise the tensor's layout then.
        for now in living(leaf):
            way, digest = WayBack(Place(now._local_tensor, now._spec)), digest_of(now)
        counts = call_counts_of(way.spec.mesh)
        digest = hash((digest, counts.passing))
        shown = as_seen(grad, way.spec)
        seen = wrap_as(kind, shown, way.spec.grad_spec, digest)
        result = hook(seen)
        if result is None:
            if seen._digest == digest:
                return None
            counts.note_gradient(digest_of(seen))  # written in place
            if shown is grad:
                return None
            result = seen
        if not isinstance(result, Tensor):
            raise TypeError(
                f"a hook on a gradient has returned a {type(result).__name__}: it has to return "
                f"None, or another gradient"
            )
        if result.shape != seen.shape:
            raise RuntimeError(
                f"a hook on the gradient of a tensor of shape {list(seen.shape)} has returned one "
                f"of shape {list(result.shape)}: it has to return None, or another gradient"
            )
        counts.note_gradient(plain_or_digest(result))
        return way.take(result, "what a hook returns")

    return local.register_hook(called)


def register_post_accumulate_grad_hook(
    tensor: DTensorBase, hook: Callable[[DTensorBase], None]
) -> _Handles:
    """Call ``hook`` with the tensor when ``grad`` was accumulated into; the handle removes the
    hook.

    torch also calls such hooks if a node with several inputs gave gradients only to other inputs. A
    hook before the accumulation therefore notes whether there is a gradient.
    """
    if (reduce := deferred_grad(tensor)) is not None:  # of passes before: not for this hook
        reduce()
    local: Any = in_graph(tensor)
    has_grad = [False]
    # The graph holds the hook: if that held the tensor, neither would ever be freed.
    kind, leaf, spec, digest = type(tensor), [ref(tensor)], tensor._spec, digest_of(tensor)

    def before(grad: Tensor | None) -> None:
        has_grad[0] = grad is not None

    def called(local: Tensor) -> None:  # what a hook returns is of no use to torch either
        if has_grad[0]:
            (now,) = living(leaf) or [wrap_as(kind, local, spec, digest)]
            hook(now)

    return _Handles(local.register_hook(before), local.register_post_accumulate_grad_hook(called))


class _Handles:
    """Several hooks that are removed together; as a context, when the context ends."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` where some of the tensors are DTensors."""
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if is_grads_batched:
        raise RuntimeError(
            "is_grads_batched=True (and vectorize=True) maps over tensors, which cannot "
            "communicate then, and some are DTensors: call torch.autograd.grad for each row of "
            "grad_outputs"
        )
    roots = _roots(outs, grad_outputs)
    places = [_place_of(tensor) for tensor in ins]
    locals_ = [local for local, _ in places]
    with watching(locals_), _Pass(outs, grad_outputs, accumulates=False) as digest:
        grads = torch.autograd.grad(
            [root for root, _ in roots],
            locals_,
            [grad for _, grad in roots],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
    return tuple(
        wrap_as(
            type(tensor), as_seen(grad, spec), spec.grad_spec, hash((digest, digest_of(tensor)))
        )
        if isinstance(tensor, DTensorBase) and grad is not None and spec is not None
        else grad
        for tensor, (_, spec), grad in zip(ins, places, grads, strict=True)
    )


def _place_of(tensor: Tensor) -> tuple[Tensor, DTensorSpec | None]:
    """The local tensor that gets a tensor's gradient, and the layout (None for a plain one)."""
    if not isinstance(tensor, DTensorBase):
        return tensor, None
    local_of(tensor)
    return tensor._local_tensor, tensor._spec
