"""Gradients of DTensors: where they come in terms, when those are reduced, and how they lie.

The graph is that of the local tensors. A rank that computes with a replicated tensor and its own
part of something else gets only a term of the tensor's gradient. So such an operator takes the
local tensor through an *alias*: the same memory at a place in the graph whose backward reduces the
terms. All uses of a tensor share one alias, so that its gradient is reduced once. Terms for
leaves (parameters) are kept until the end of the backward pass and reduced together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.comm.collectives import all_reduce
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world
from tilework.dtensor import aliasing, explaining
from tilework.dtensor.redistribution import axes_group, out_of_terms, redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.errors import CollectiveMismatchError
from tilework.layout import Partial, Placement

if TYPE_CHECKING:
    from tilework.dtensor.tensor import DTensor

_WithoutInterception = torch._C.DisableTorchFunctionSubclass
_base: Any = torch._C.TensorBase
_flag_of = _base.requires_grad.__get__
_grad_fn_of = _base.grad_fn.__get__
_grad_of = _base.grad.__get__

#: The most that is reduced in one message; it is also what is held besides the gradients.
_BUCKET_BYTES = 64 << 20


# -- the local tensor's place in the graph ---------------------------------------------------


def local_of(tensor: DTensor) -> Tensor:
    """This rank's part, at its place in the graph."""
    if tensor._view_of is not None:
        aliasing.refresh(tensor)
    local = tensor._local_tensor
    if not local.requires_grad and torch.is_grad_enabled() and _flagged(tensor):
        return _linked(tensor)
    return local


def _flagged(tensor: DTensor) -> bool:
    with _WithoutInterception():
        return bool(_flag_of(tensor))


def flag(tensor: DTensor) -> None:
    """Let C++ see whether it requires a gradient, so that a user's own Function keeps it."""
    with _WithoutInterception():
        if _flag_of(tensor) != tensor._local_tensor.requires_grad and _grad_fn_of(tensor) is None:
            _base.requires_grad_(tensor, tensor._local_tensor.requires_grad)


def grad_fn_of(tensor: DTensor) -> Any:
    """The node that computed it: a user's own Function, or that of the local tensor."""
    with _WithoutInterception():
        node = _grad_fn_of(tensor)
    return local_of(tensor).grad_fn if node is None else node


def _linked(tensor: DTensor) -> Tensor:
    """The part of what a user's own autograd.Function returned, linked to the Function.

    C++ put the Function into the graph of the wrappers, where no gradient would ever come.
    """
    with _WithoutInterception():
        node = _grad_fn_of(tensor)
    if node is None:
        return tensor._local_tensor
    leaves = _leaves(node)
    tensor._local_tensor = _Link.apply(  # type: ignore[no-untyped-call]
        tensor._local_tensor, [tensor], leaves, *[local_of(leaf) for leaf in leaves]
    )
    return tensor._local_tensor


def _leaves(node: Any) -> list[DTensor]:
    """The wrappers that a node of C++'s graph comes from."""
    from tilework.dtensor.tensor import DTensor

    found, seen, todo = [], set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, DTensor):
            found.append(variable)
        todo.extend(next_node for next_node, _ in node.next_functions)
    return found


class _Link(torch.autograd.Function):
    """From the graph of local tensors into that of wrappers, and back out at its leaves."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, tensor: list[DTensor], leaves: list[DTensor], *locals_: Tensor
    ) -> Tensor:
        # In lists, where C++ does not take the wrappers for inputs.
        (ctx.tensor,), ctx.leaves = tensor, leaves
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from tilework.dtensor.tensor import wrap

        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient of a gradient through your own autograd.Function on DTensors: write "
                "the Function on local tensors (to_local, from_local), where torch can do it"
            )
        # Not torch.autograd.grad: reentrant checkpoints want gradients to be accumulated.
        torch.autograd.Variable._execution_engine.run_backward(
            (ctx.tensor,),
            (wrap(grad, ctx.tensor._spec.dual),),
            True,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        with _WithoutInterception():
            found = [_grad_of(leaf) for leaf in ctx.leaves]
            for leaf in ctx.leaves:
                _base.grad.__set__(leaf, None)
        grads = [
            None if one is None else _lying_as(one, leaf._spec.dual, "the gradient")
            for one, leaf in zip(found, ctx.leaves, strict=True)
        ]
        return None, None, None, *grads


# -- terms -----------------------------------------------------------------------------------


class Alias(NamedTuple):
    """The local tensor again, at a place whose gradients come in terms."""

    tensor: Tensor
    #: What it was made from, and where that then was in the graph.
    local: Tensor
    grad_fn: Any


def alias(tensor: DTensor, axes: Ints) -> Tensor:
    """This rank's part, for an operator that gives each rank along ``axes`` a term of its gradient.

    All uses until the tensor is written to share it.
    """
    local = local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    known = None if tensor._aliases is None else tensor._aliases.get(axes)
    if (
        known is None
        or known.local is not local
        or known.grad_fn is not local.grad_fn
        or known.tensor.data_ptr() != local.data_ptr()
    ):
        made = _alias(local, in_terms(tensor._spec.dual, axes), tensor._spec.dual)
        known = Alias(made, local, local.grad_fn)
        if tensor._aliases is None:
            tensor._aliases = {}
        tensor._aliases[axes] = known
    return known.tensor


def _alias(local: Tensor, terms: DTensorSpec, whole: DTensorSpec) -> Tensor:
    account = current_world().state(Account)
    account.made += 1
    made: Tensor = _InTerms.apply(  # type: ignore[no-untyped-call]
        local, terms, whole, account if local.is_leaf else None, account.made
    )
    return made


def in_terms(spec: DTensorSpec, axes: Ints) -> DTensorSpec:
    """The layout of a gradient that is still to be summed along ``axes``."""
    placements: list[Placement] = list(spec.placements)
    for axis in axes:
        placements[axis] = Partial()
    return spec.with_placements(placements, spec.order)


def moved(tensor: DTensor, target: DTensorSpec, axes: Ints) -> Tensor:
    """This rank's part in another layout, whose gradient comes in terms along ``axes``.

    The gradient goes straight from there to the tensor's layout.
    """
    source, local = tensor._spec, local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return redistribute_local(local, source, target)
    if source.partial_axes:
        return _alias(
            redistribute_local(local, source, target), in_terms(target.dual, axes), target.dual
        )
    if target.dual == source:  # one rank's term is the value: its gradient may wait for others'
        return redistribute_local(alias(tensor, axes), source, target)
    found: Tensor = _MovedInTerms.apply(  # type: ignore[no-untyped-call]
        local, source, target, in_terms(target.dual, axes)
    )
    return found


def lead_terms_back(result: DTensor, tensor: DTensor, axes: Ints) -> None:
    """Let terms of the gradient of ``result`` go straight to ``tensor``, as :func:`moved` does.

    ``tensor`` was redistributed to ``result``. Of operators that take ``result`` and give each rank
    along ``axes`` a term of its gradient, all terms are reduced into the layout of ``tensor``,
    instead of to whole sums of which each rank then takes its part.
    """
    local, source = local_of(result), tensor._spec
    if not (local.requires_grad and torch.is_grad_enabled()) or source.partial_axes:
        return
    terms = in_terms(result._spec.dual, axes)
    made = _MovedInTerms.apply(  # type: ignore[no-untyped-call]
        local_of(tensor), source, result._spec, terms, local.detach()
    )
    result._aliases = {axes: Alias(made, local, local.grad_fn)}


class _MovedInTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        source: DTensorSpec,
        target: DTensorSpec,
        terms: DTensorSpec,
        done: Tensor | None = None,
    ) -> Tensor:
        ctx.terms, ctx.source = terms, source.dual
        found = redistribute_local(local, source, target) if done is None else done
        return found.detach() if found is local or found is done else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return redistribute_local(grad, ctx.terms, ctx.source), None, None, None, None


class _InTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        terms: DTensorSpec,
        whole: DTensorSpec,
        account: Account | None,
        number: int,
    ) -> Tensor:
        ctx.terms, ctx.whole, ctx.account, ctx.number = terms, whole, account, number
        ctx.leaf = None
        if account is not None:
            with torch.enable_grad():
                ctx.leaf = torch.autograd.graph.get_gradient_edge(local).node
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.leaf is not None and _may_wait(ctx.leaf):
            ctx.account.keep(ctx.leaf.variable, grad, ctx.terms, ctx.number)
            return None, None, None, None, None
        return redistribute_local(grad, ctx.terms, ctx.whole), None, None, None, None


def _may_wait(leaf: Any) -> bool:
    """Whether nobody asks for the gradient of a leaf before the end of the backward pass."""
    if torch.is_grad_enabled():  # gradients are differentiated themselves
        return False
    variable = leaf.variable
    if variable._backward_hooks or variable._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch.autograd.grad takes the gradient, and accumulates nothing
        return False


@dataclass(eq=False)
class _Kept:
    leaf: Tensor
    grad: Tensor
    terms: DTensorSpec
    number: int


@dataclass(eq=False)
class Account:
    """Terms of one rank's leaves that backward passes under way have come to."""

    #: How many aliases were made: numbers them alike on every rank.
    made: int = 0
    #: By backward pass, then by leaf and axes.
    kept: dict[int, dict[tuple[int, Ints], _Kept]] = field(default_factory=dict)
    #: Which leaves were reduced together; all ranks have agreed that they are these.
    known: set[tuple[int, ...]] = field(default_factory=set)

    def keep(self, leaf: Tensor, grad: Tensor, terms: DTensorSpec, number: int) -> None:
        """Reduce ``grad`` at the end of this backward pass, and accumulate it into the leaf."""
        task = torch._C._current_graph_task_id()
        kept = self.kept.get(task)
        if kept is None:
            if len(self.kept) > 16:  # what is left of passes that raised
                self.kept.clear()
            kept = self.kept[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self.reduce(self.kept.pop(task, {}))
            )
        key = id(leaf), terms.partial_axes
        if key in kept:
            kept[key].grad = kept[key].grad + grad
        else:
            kept[key] = _Kept(leaf, grad, terms, number)

    @torch.no_grad()
    def reduce(self, kept: dict[tuple[int, Ints], _Kept]) -> None:
        """Sum all terms over the ranks, in few messages. Collective."""
        together: dict[Any, list[_Kept]] = {}
        for one in sorted(kept.values(), key=lambda one: one.number):
            mesh, axes = one.terms.mesh, one.terms.partial_axes
            key = mesh, axes, one.grad.dtype, one.grad.device
            together.setdefault(key, []).append(one)
        for (mesh, axes, _, _), all_of_them in together.items():
            group = axes_group(mesh, axes)
            for bucket in _buckets(all_of_them):
                self._check_same(bucket, group)
                _reduce_bucket(bucket, group)

    def _check_same(self, bucket: list[_Kept], group: ProcessGroup) -> None:
        """That all ranks are about to reduce gradients of the same leaves."""
        numbers = tuple(one.number for one in bucket)
        if numbers in self.known:
            return
        if len(self.known) > 4096:
            self.known.clear()
        mine = [(one.number, tuple(one.grad.shape)) for one in bucket]
        for rank, theirs in zip(group.global_ranks, agree(lambda: mine, group), strict=True):
            if theirs != mine:
                raise CollectiveMismatchError(
                    f"a backward pass came to gradients of {len(mine)} replicated tensors on rank "
                    f"{group.global_ranks[group.rank()]}, of shapes {[s for _, s in mine]}, and of "
                    f"{len(theirs)} on rank {rank}, of shapes {[s for _, s in theirs]}: all ranks "
                    f"of the mesh must compute with the same tensors",
                    ranks=[rank],
                )
        self.known.add(numbers)


def _buckets(all_of_them: list[_Kept]) -> list[list[_Kept]]:
    buckets: list[list[_Kept]] = [[]]
    size = 0
    for one in all_of_them:
        if buckets[-1] and size + one.grad.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(one)
        size += one.grad.nbytes
    return buckets


def _reduce_bucket(bucket: list[_Kept], group: ProcessGroup) -> None:
    first = bucket[0].grad
    if explaining.watchers:
        terms = bucket[0].terms
        explaining.reduced(terms, terms.partial_axes, [one.grad for one in bucket])
    sizes = [one.grad.numel() for one in bucket]
    flat = (
        group.empty(sum(sizes), dtype=first.dtype)
        if first.device.type == "cpu"
        else first.new_empty(sum(sizes))
    )
    torch.cat([one.grad.reshape(-1) for one in bucket], out=flat)
    all_reduce(flat, group=group)
    for one, part in zip(bucket, torch.split(flat, sizes), strict=True):
        grad = part.view(one.grad.shape)
        if one.leaf.grad is None:
            one.leaf.grad = grad
        else:
            one.leaf.grad += grad


# -- what DTensor's methods do ---------------------------------------------------------------


def local_with_grad(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    """The local tensor, whose gradient will lie as ``placements`` say."""
    spec = tensor._spec
    terms = spec_of(spec.mesh, placements, spec.shape, spec.order)
    local = local_of(tensor)
    if terms == spec.dual or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    if terms.local_shape != spec.local_shape or terms.dual != spec.dual:
        raise ValueError(
            f"the gradient of a tensor that lies as {list(spec.placements)} cannot lie as "
            f"{list(placements)}: Partial() may stand where the tensor is replicated, nothing else"
        )
    return alias(tensor, terms.partial_axes)


def set_grad(tensor: DTensor, value: Tensor) -> None:
    """Make ``value`` the tensor's gradient."""
    from tilework.dtensor.tensor import DTensor

    tensor._grad = None
    if not isinstance(value, DTensor):
        raise TypeError(
            f"the gradient of a DTensor is a DTensor, got {type(value).__name__}: distribute it "
            f"with distribute_tensor(grad, mesh, placements)"
        )
    if value.shape != tensor.shape:
        raise RuntimeError(
            f"a gradient has its tensor's shape, {list(tensor.shape)}, got {list(value.shape)}"
        )
    tensor._local_tensor.grad = _lying_as(value, tensor._spec.dual, "the gradient")
    if value._spec == tensor._spec.dual:
        tensor._grad = value


def _lying_as(tensor: Tensor, spec: DTensorSpec, what: str) -> Tensor:
    """The local part of ``tensor`` in another layout; a plain tensor counts as replicated."""
    from tilework.dtensor.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return redistribute_local(tensor, spec.replicated, spec)
    if tensor._spec.mesh != spec.mesh:
        raise ValueError(
            f"{what} lies on {tensor._spec.mesh}, the tensor on {spec.mesh}: they must be on the "
            f"same mesh"
        )
    return redistribute_local(local_of(tensor), tensor._spec, spec)


def become(tensor: DTensor, value: DTensor) -> DTensor:
    """Make ``tensor`` what an operator in place has changed it to, of whatever shape."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec
    tensor._aliases = tensor._grad = None
    with _WithoutInterception():
        _base.data.__set__(tensor, value)
    return tensor


def set_data(tensor: DTensor, value: Tensor) -> None:
    """Make ``value`` what the tensor holds, as ``tensor.data = value`` does."""
    from tilework.dtensor.tensor import DTensor

    if not isinstance(value, DTensor):
        raise TypeError(
            f"a DTensor's data is a DTensor, got {type(value).__name__}: distribute it first"
        )
    tensor._local_tensor.data = value._local_tensor.data
    tensor._spec, tensor._aliases, tensor._grad = value._spec, None, None
    with _WithoutInterception():
        _base.data.__set__(tensor, value)


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
        inputs = [plain(one) for one in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    pairs = _roots(outs, grad_tensors if grad_variables is None else grad_variables)
    if pairs:
        torch.autograd.backward(
            [root for root, _ in pairs],
            [grad for _, grad in pairs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=inputs,
        )


def _roots(outs: Sequence[Tensor], grads: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Local tensors that gradients start from, with theirs; none on a rank outside the mesh."""
    from tilework.dtensor.tensor import DTensor

    given = [grads] if isinstance(grads, Tensor) else grads or [None] * len(outs)
    return [
        root_of(out, grad) if isinstance(out, DTensor) else (out, grad)
        for out, grad in zip(outs, given, strict=True)
        if not isinstance(out, DTensor) or out._spec.takes_part
    ]


def root_of(tensor: DTensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    """A local tensor that gradients start from, and its gradient."""
    spec = tensor._spec
    local = local_of(tensor)
    if spec.reduce_op not in (None, "sum"):
        local = redistribute_local(local, spec, spec.dual)
    if gradient is not None:
        if gradient.shape != tensor.shape:
            raise RuntimeError(
                f"a gradient has its tensor's shape, {list(tensor.shape)}, got "
                f"{list(gradient.shape)}"
            )
        grad = _lying_as(gradient, spec.dual, "the gradient")
        if spec.partial_axes and spec.reduce_op == "sum" and grad.requires_grad:
            grad = _alias(grad, in_terms(spec.dual, spec.partial_axes), spec.dual)
        return local, grad
    if tensor.numel() != 1:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs: this tensor has shape "
            f"{list(tensor.shape)}, so pass its gradient"
        )
    return local, torch.ones_like(local, requires_grad=False)


def plain(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; other tensors as they are."""
    from tilework.dtensor.tensor import DTensor

    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def register_hook(tensor: DTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """What ``DTensor.register_hook`` does."""
    from tilework.dtensor.tensor import wrap

    spec = tensor._spec.dual

    def called(grad: Tensor) -> Tensor | None:
        found = hook(wrap(grad, spec))
        return None if found is None else _lying_as(found, spec, "what a hook returns")

    local: Any = local_of(tensor)
    return local.register_hook(called)


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
    from tilework.dtensor.tensor import DTensor, wrap

    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if is_grads_batched:
        raise NotImplementedError("is_grads_batched=True is not possible with DTensors: loop")
    roots = _roots(outs, grad_outputs)
    found = torch.autograd.grad(
        [root for root, _ in roots],
        [plain(one) for one in ins],
        [grad for _, grad in roots],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    return tuple(
        wrap(_own(grad, one._spec), one._spec.dual)
        if isinstance(one, DTensor) and grad is not None
        else grad
        for one, grad in zip(ins, found, strict=True)
    )


def _own(grad: Tensor, spec: DTensorSpec) -> Tensor:
    """The gradient of a tensor, to be differentiated further."""
    return out_of_terms(grad, spec.dual, spec.partial_axes) if spec.partial_axes else grad
