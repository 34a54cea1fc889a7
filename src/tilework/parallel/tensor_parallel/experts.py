"""Expert parallelism: stacked experts on several ranks, and rows that travel to them and back.

Rows are sorted by expert, exchanged once, computed where the expert is, and exchanged back (GShard,
https://arxiv.org/abs/2006.16668). An expert takes rows in the order of ranks, then of places,
so that a sum has the same order, and the same bits, on any number of ranks.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilework.comm.contract import ProcessGroup
from tilework.comm.functional.internal import all_gather_tensor, all_reduce, all_to_all_single
from tilework.comm.operations.internal import agree
from tilework.comm.provenance_digest import carrying
from tilework.dtensor import DTensor
from tilework.dtensor.internal import digest_of, layout_of
from tilework.errors import CollectiveMismatchError
from tilework.layout import Partial, Placement, Replicate, Shard, chunk_offsets, chunk_sizes
from tilework.mesh import DeviceMesh
from tilework.parallel.passes import is_due
from tilework.parallel.tensor_parallel.axis import MeshAxis
from tilework.parallel.tensor_parallel.styles import ParallelStyle
from tilework.show import Page, TextTable

_NAME = "expert_parallel"
#: The most rows with which linearity is tried.
_TRIED = 8


class ExpertParallel(ParallelStyle):
    """Each rank holds some experts of a module with stacked weights.

    The module has weights ``[experts, ...]``, and is called with rows ``[n, features]``, the
    experts of each row ``[n, k]``, and their weights ``[n, k]``, as the expert modules of
    transformers are. The result of a row is the sum, over the experts, of the weight times the
    expert's result for the row; the module is called with a single expert per row, weight 1, and
    (trials aside) only where this rank has rows. The router stays outside. Forward exchanges counts
    once and rows twice, backward rows twice. The number of experts need not be divisible: ranks may
    have none.

    DTensors are taken in any layout, and the result has the layout of the rows. Of plain tensors
    ``dispatch`` says what they are. With ``"rows"`` on a mesh of a single axis each rank's loss
    counts as the mean over that rank's rows, as in data parallelism: gradients of experts are means
    over ranks. Average those of the other parameters, by ``fully_shard(model, mesh=axis,
    ignored_params=experts.parameters())``, for instance.

    Args:
        dispatch: ``"rows"``: plain tensors are this rank's rows. ``"replicate"``: they are equal
            on all ranks, and so is the result.
        capacity: The rows that an expert takes at most, as a multiple of the mean over experts;
            None: all. Rows beyond it, in the order of ranks and places, are dropped: the expert
            adds nothing to them, and their gradient is zero.

    Raises:
        TypeError: ``capacity`` is no number.
        ValueError: An argument is none of these; or, on forward, on all ranks: an expert's number
            is out of range, a weight is NaN, or the module is not linear in weights. That is tried
            in the first forwards, and in some later ones, with a few of a rank's rows, in the
            module's eval mode; twice the weight must give twice the result.
        CollectiveMismatchError: By ``parallelize_module``: ranks have other arguments.

    Example:
        >>> import torch
        >>> from tilework.dtensor import init_device_mesh
        >>> from tilework.parallel import ExpertParallel, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> class Scales(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.tensor([1.0, 10.0, 100.0]))
        ...
        ...     def forward(self, rows, experts, weights):
        ...         return (self.scale[experts] * weights).sum(1, keepdim=True) * rows
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     experts = parallelize_module(Scales(), mesh, ExpertParallel())
        ...     rows, weights = torch.ones(1, 1), torch.ones(1, 1)
        ...     return experts(rows, torch.tensor([[2 * rank]]), weights).item()
        >>> run_ranks(2, program)
        [1.0, 100.0]
    """

    def __init__(
        self,
        dispatch: Literal["rows", "replicate"] = "rows",
        capacity: float | None = None,
    ) -> None:
        if dispatch not in ("rows", "replicate"):
            raise ValueError(f'dispatch must be "rows" or "replicate", got {dispatch!r}')
        if isinstance(capacity, bool) or not isinstance(capacity, int | float | None):
            raise TypeError(f"capacity is a number or None, got {capacity!r}")
        if capacity is not None and not 0 < capacity < math.inf:
            raise ValueError(
                f"capacity is a multiple of the mean of rows per expert, above 0, got {capacity!r}"
            )
        self.dispatch = dispatch
        self.capacity = capacity

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
        own = dict(module.named_parameters(recurse=False))
        if not own or len(own) < len(shapes) or len({shape[:1] for shape in shapes.values()}) > 1:
            raise NotImplementedError(
                f"ExpertParallel takes a module with stacked weights, [experts, ...] "
                f"each, not {type(module).__name__}, which has {shapes or 'none'}: name the module "
                f"that holds the stacks, or stack the weights of a list of experts"
            )
        if _NAME in vars(module):
            raise ValueError(f"{type(module).__name__} has a style already: {_style_of(module)}")
        if stacks := [name for name, each in module.named_buffers() if each.dim()]:
            raise NotImplementedError(
                f"{stacks} of {type(module).__name__} are buffers: ranks hold some experts' part "
                f"of parameters only. Make them parameters [experts, ...], with requires_grad=False"
            )
        return dict.fromkeys(own, Shard(0))

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        group = axis.mesh.get_group(axis.number)
        styles = agree(lambda: repr(self), group)
        if len(set(styles)) > 1:
            each = dict(zip(group.global_ranks, styles, strict=True))
            raise CollectiveMismatchError(
                f"ranks have other styles for {axis.layer}: {each}. Pass the same arguments on all",
                ranks=tuple(group.global_ranks),
            )
        vars(module)[_NAME] = _Experts(self, axis, _function_of(module))
        module.forward = MethodType(_forward, module)  # a deep copy's is bound to the copy

    def __repr__(self) -> str:
        return f"ExpertParallel(dispatch={self.dispatch!r}, capacity={self.capacity})"


def _style_of(module: nn.Module) -> ExpertParallel:
    experts: _Experts = vars(module)[_NAME]
    return experts.style


def _function_of(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    if isinstance(forward, MethodType):
        return forward.__func__
    return lambda _, *inputs: forward(*inputs)


def _forward(module: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    experts: _Experts = vars(module)[_NAME]
    bound = inspect.signature(experts.function).bind(module, *inputs, **named)
    values = [*bound.args[1:], *bound.kwargs.values()]
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"{experts.axis.layer} takes rows [n, features], experts [n, k] and weights [n, k], "
            f"got {[type(value).__name__ for value in values]}"
        )
    return experts.run(module, *values)


@dataclass(frozen=True)
class _Dispatch:
    """The rows that each rank sends to each expert: ``sent[rank][expert]``, after drops."""

    routed: list[list[int]]
    sent: list[list[int]]

    @classmethod
    def of(cls, routed: list[list[int]], capacity: float | None) -> _Dispatch:
        if capacity is None:
            return cls(routed, routed)
        totals = list(map(sum, zip(*routed, strict=True)))
        limit = math.ceil(capacity * sum(totals) / len(totals))
        before = accumulate(routed, _plus, initial=[0] * len(totals))
        return cls(
            routed,
            [
                [max(0, min(n, limit - b)) for n, b in zip(row, earlier, strict=True)]
                for row, earlier in zip(routed, before, strict=False)
            ],
        )


def _plus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


@dataclass
class _Balance:
    """The balance in a forward: rows and weight by expert, of this rank's rows."""

    counts: Tensor
    weight: Tensor
    rows: int
    top: int
    #: The mesh and the placements of both vectors; None: of rows of a single axis.
    mesh: DeviceMesh
    placements: list[Placement] | None
    spent: bool = False


@dataclass
class _Experts:
    """The experts of a module on the ranks of an axis."""

    style: ExpertParallel
    axis: MeshAxis
    #: The module's forward, for any rows and experts.
    function: Callable[..., Any]
    last: _Dispatch | None = None
    #: The number of forwards.
    calls: int = 0
    balances: list[weakref.ref[_Balance]] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> _Experts:
        return _Experts(self.style, self.axis, self.function)

    @property
    def layout(self) -> Placement:
        """The placement of a plain tensor along the axis."""
        return Replicate() if self.style.dispatch == "replicate" else Shard(0)

    def run(self, module: nn.Module, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' results for each row, weighed and summed."""
        self._check(module, rows, ids, weights)
        plain = not isinstance(rows, DTensor)
        if plain and self.style.dispatch == "rows" and self.axis.mesh.ndim == 1:
            return self._local(module, (rows, ids, weights), None)
        whole = [
            self.axis.annotate(each, self.layout, f"{name} of {self.axis.layer}")
            for each, name in ((rows, "rows"), (ids, "experts"), (weights, "weights"))
        ]
        spec = layout_of(whole[0])
        placements: list[Placement] = [
            each if isinstance(each, Shard) and each.dim == 0 else Replicate()
            for each in spec.placements
        ]
        back = [Replicate() if each.is_partial() else each for each in spec.placements]
        if not isinstance(placements[self.axis.number], Shard):
            placements[self.axis.number] = Shard(0)
        moved = [each.redistribute(placements=placements) for each in whole]
        parts = tuple(each.to_local() for each in moved)
        with carrying(hash(tuple(map(digest_of, whole))), self.axis.layer, whole[1]):
            local = self._local(module, parts, placements)
        made = DTensor.from_local(local, self.axis.mesh, placements, shape=rows.shape)
        result = made.redistribute(placements=back)
        return self.axis.to_local(result) if plain else result

    def _check(self, module: nn.Module, rows: Tensor, ids: Tensor, weights: Tensor) -> None:
        if (
            rows.dim() != 2
            or ids.dim() != 2
            or ids.shape != weights.shape
            or (len(ids) != len(rows))
        ):
            raise ValueError(
                f"{self.axis.layer} takes rows [n, features], experts [n, k] and weights [n, k], "
                f"got {list(rows.shape)}, {list(ids.shape)} and {list(weights.shape)}"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"the experts of rows are integers, got {ids.dtype}")
        kinds = {isinstance(each, DTensor) for each in (rows, ids, weights)}
        if len(kinds) > 1:
            raise TypeError(
                f"{self.axis.layer} takes rows, experts and weights that are all DTensors, or all "
                f"plain tensors: distribute_tensor makes a plain tensor a DTensor"
            )
        for name in module._parameters:
            parameter = getattr(module, name)
            if not isinstance(parameter, DTensor) or parameter.device_mesh != self.axis.mesh:
                raise ValueError(
                    f"{name} of {self.axis.layer} is no DTensor on {self.axis.mesh}: another "
                    f"wrapper has taken it. Leave the experts out of wrappers over the axis of "
                    f"experts, as by fully_shard(..., ignored_params=experts.parameters())"
                )

    def _local(
        self,
        module: nn.Module,
        tensors: tuple[Tensor, ...],
        placements: list[Placement] | None,
    ) -> Tensor:
        """The result for this rank's rows. Collective over the axis."""
        rows, ids, weights = tensors
        (size, top), count = ids.shape, self._count(module)
        flat = ids.reshape(-1).long()
        group = self.axis.mesh.get_group(self.axis.number)
        rank, ranks = group.rank(), group.size()
        offsets, sizes = chunk_offsets(count, ranks), chunk_sizes(count, ranks)
        self.calls += 1
        wrong = is_due(self.calls) and not self._is_linear(module, tensors, placements, sizes[rank])
        dispatch = self._exchanged_counts(flat, weights, count, (group, wrong))
        self._note_balance(flat, weights, dispatch, placements)
        sent = dispatch.sent
        kept = _kept(flat, sent[rank])
        mine = slice(offsets[rank], offsets[rank] + sizes[rank])
        outgoing = [sum(sent[rank][o : o + n]) for o, n in zip(offsets, sizes, strict=True)]
        incoming = [sum(row[mine]) for row in sent]
        leaving = _Spread.apply(rows, kept, top)  # type: ignore[no-untyped-call]
        received = all_to_all_single(leaving, incoming, outgoing, group)
        numbers = torch.arange(sizes[rank], device=flat.device, dtype=ids.dtype)
        times = torch.tensor([n for row in sent for n in row[mine]], dtype=torch.long)
        local_ids = numbers.repeat(len(sent)).repeat_interleave(times.to(flat.device))
        with self._local_weights(module, placements, sizes[rank]) as locals_:
            if len(received):
                unit = received.new_ones(len(received), 1)
                done = self.function(module, received, local_ids.unsqueeze(1), unit)
            else:
                done = _WithoutRows.apply(received, *locals_)  # type: ignore[no-untyped-call]
        if done.shape != received.shape:
            raise ValueError(
                f"{self.axis.layer} must return rows of the shape it takes, "
                f"{list(received.shape)}, got {list(done.shape)}"
            )
        back = all_to_all_single(done, outgoing, incoming, group)
        home = back.new_zeros(size * top, rows.shape[1]).index_copy(0, kept, back)
        shares = home.view(size, top, rows.shape[1]) * weights.unsqueeze(-1)
        result = shares.sum(1).to(rows.dtype)
        self._keep_balance(result)
        return result

    def _count(self, module: nn.Module) -> int:
        """The number of all experts."""
        return next(module.parameters()).shape[0]

    def _is_linear(
        self,
        module: nn.Module,
        tensors: tuple[Tensor, ...],
        placements: list[Placement] | None,
        experts: int,
    ) -> bool:
        """False if this rank's experts are not linear in the weights of some rows. Local.

        Powers of two, and signs, do not change rounding: results are equal bit for bit.
        """
        rows, ids, weights = (each.detach() for each in tensors)
        if not experts:
            return True
        few = rows[rows.any(1)][:_TRIED]  # zeros tell nothing
        few = few if len(few) else rows.new_ones(1, rows.shape[1])
        numbers = torch.arange(len(few), device=ids.device).remainder(experts).to(ids.dtype)
        factors = [2.0, -1.0] if bool((weights < 0).any()) else [2.0]
        with torch.no_grad(), _evaluating(module), self._local_weights(module, placements, experts):
            once, *others = [
                self.function(module, few.clone(), numbers[:, None], few.new_full((len(few), 1), w))
                for w in (1.0, *factors)
            ]
        pairs = [(once * w, other) for w, other in zip(factors, others, strict=True)]
        return all(
            bool(((a == b) | ~(a.isfinite() & b.isfinite())).all()) or a.shape != few.shape
            for a, b in pairs
        )

    def _exchanged_counts(
        self, flat: Tensor, weights: Tensor, count: int, state: tuple[ProcessGroup, bool]
    ) -> _Dispatch:
        """The rows of each rank for each expert; raises on all ranks if a rank has bad numbers.

        ``state`` is the group, and True if this rank's experts are not linear.
        """
        group, wrong = state
        bad = ((flat < 0) | (flat >= count)).sum()
        nan = weights.detach().isnan().sum()
        counts = torch.bincount(flat.clamp(0, count - 1), minlength=count)
        mine = [counts, bad.view(1), nan.view(1), counts.new_tensor([wrong])]
        lines: list[list[int]] = (
            all_gather_tensor(torch.cat(mine), 0, group).view(-1, count + len(mine) - 1).tolist()
        )
        if ranks := [rank for rank, line in enumerate(lines) if line[-1]]:
            raise ValueError(
                f"{self.axis.layer} is not linear in the weights of experts (on ranks {ranks} of "
                f"the axis): a multiple of the weight does not give this multiple of the result. "
                f"ExpertParallel calls the module with weight 1, and weighs results where rows "
                f"came from: let forward return the sum of weight times the expert's result, and "
                f"do the rest outside the module"
            )
        for column, what in ((-3, f"an expert's number outside 0 to {count - 1}"), (-2, "NaN")):
            if ranks := [rank for rank, line in enumerate(lines) if line[column]]:
                raise ValueError(
                    f"the router gave {self.axis.layer} {what} on ranks {ranks} of the axis"
                )
        self.last = _Dispatch.of([line[:count] for line in lines], self.style.capacity)
        return self.last

    @contextmanager
    def _local_weights(
        self, module: nn.Module, placements: list[Placement] | None, experts: int
    ) -> Iterator[list[Tensor]]:
        """Let the module have this rank's experts, as plain tensors, and their number."""
        size, own = self.axis.mesh.size(self.axis.number), vars(module)
        mine: dict[str, Any] = {}
        for name in module._parameters:  # attributes are found in __dict__ first
            parameter = getattr(module, name)
            grads = [
                each if axis == self.axis.number else _summed(placements, axis)
                for axis, each in enumerate(layout_of(parameter).placements)
            ]
            # A view, since to_local() may return the same tensor in each call: hooks would add up.
            mine[name] = local = parameter.to_local(grad_placements=grads)[:]
            if placements is None and local.requires_grad and size > 1:
                local.register_hook(lambda grad: grad / size)
        if isinstance(own.get("num_experts"), int):
            mine["num_experts"] = experts
        saved = {name: own[name] for name in mine if name in own}
        own.update(mine)
        try:
            yield [each for each in mine.values() if isinstance(each, Tensor)]
        finally:
            for name in mine:
                del own[name]
            own.update(saved)

    # -- balance -----------------------------------------------------------------------------

    def _note_balance(
        self,
        flat: Tensor,
        weights: Tensor,
        dispatch: _Dispatch,
        placements: list[Placement] | None,
    ) -> None:
        """Keep what :func:`balance_loss` needs, while the graph of the forward lives."""
        self._noted: _Balance | None = None
        if not (torch.is_grad_enabled() and weights.requires_grad):
            return
        count = len(dispatch.routed[0])
        counts = torch.bincount(flat, minlength=count)
        weight = weights.new_zeros(count).index_add(0, flat, weights.reshape(-1))
        at = placements and [Partial() if isinstance(e, Shard) else e for e in placements]
        self._noted = _Balance(
            counts, weight, len(weights), weights.shape[1], self.axis.mesh, at or None
        )

    def _keep_balance(self, result: Tensor) -> None:
        noted, self._noted = self._noted, None
        in_backward = torch._C._current_graph_task_id() != -1  # recomputed for a checkpoint
        if noted is None or result.grad_fn is None or in_backward:
            return

        def spend(_: Tensor) -> None:
            noted.spent = True

        node: Any = result.grad_fn
        node.metadata[_NAME] = noted  # lives as long as the graph
        result.register_hook(spend)  # type: ignore[no-untyped-call]
        self.balances = [each for each in self.balances if each() is not None]
        self.balances.append(weakref.ref(noted))

    def taken_balances(self) -> list[_Balance]:
        """Those of the forwards since the last call whose backward has not run."""
        found = [each() for each in self.balances]
        self.balances = []
        return [each for each in found if each is not None and not each.spent]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Let the module be in eval mode: nothing is drawn at random."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def _summed(placements: list[Placement] | None, axis: int) -> Placement:
    """The layout of an expert's gradient along another axis: partial where it shards rows."""
    if placements is None or placements[axis].is_replicate():
        return Replicate()
    return Partial()


def _kept(flat: Tensor, sent: Sequence[int]) -> Tensor:
    """The places that are sent, by expert: the first ``sent[expert]`` of each."""
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(sent))
    expert = flat[order]
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[expert]
    return order[place < torch.tensor(sent, device=flat.device)[expert]]


class _Spread(torch.autograd.Function):
    """The row of each place that is sent; gradients of a row's places are summed in their order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.sizes = len(rows), top
        return rows.index_select(0, kept // max(top, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,), (size, top), (grad,) = ctx.saved_tensors, ctx.sizes, grads
        home = grad.new_zeros(size * top, grad.shape[1]).index_copy_(0, kept, grad)
        return home.view(size, top, grad.shape[1]).sum(1), None, None


class _WithoutRows(torch.autograd.Function):
    """No rows: they pass, and the weights have gradients of zeros, as on ranks with rows."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (*grads, *map(torch.zeros_like, ctx.saved_tensors))


def _experts_in(model: nn.Module) -> list[tuple[str, _Experts]]:
    found = [
        (name or type(module).__name__, vars(module)[_NAME])
        for name, module in model.named_modules()
        if _NAME in vars(module)
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no module of ExpertParallel: call parallelize_module with "
            f"that style first"
        )
    return found


def balance_loss(
    model: nn.Module,
    router_logits: Sequence[Tensor] | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """The unevenness of the router's choices: 1 if even, at most the number of experts.

    For each module of :class:`ExpertParallel` the number of experts times the sum, over experts, of
    the share of places that went there and the mean weight that rows gave there (Switch
    Transformers, https://arxiv.org/abs/2101.03961, equation 4); then the mean over modules. It
    covers all forwards with gradients since the last call whose backward has not run, so that
    several microbatches count as a batch. Counts and weights are summed over the axes that shard
    rows. Collective over these axes; blocks; differentiable.

    Args:
        model: A model with such modules.
        router_logits: The logits ``[n, experts]`` of all routers, in the modules' order; then the
            mean probability is taken instead of the mean weight. Needed with a single expert per
            row whose weight is normalized to 1.
        mesh: For plain rows, the axes over which ranks have different rows: with ``"rows"`` the
            style's axis too, with ``"replicate"`` other axes only. None: the style's axis.
            Gradients are then those of the mean of the ranks' losses, as in DDP.

    Raises:
        ValueError: No forward was made; weights are constant; or ``mesh`` has an axis where rows
            are replicated, or DTensors.

    Example:
        >>> import torch
        >>> from tilework.dtensor import init_device_mesh
        >>> from tilework.parallel import ExpertParallel, balance_loss, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> class Identity(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(2, 1))  # of two experts
        ...
        ...     def forward(self, rows, experts, weights):
        ...         return rows * self.weight[experts[:, 0]] * weights
        >>> def program(rank):
        ...     experts = parallelize_module(
        ...         Identity(), init_device_mesh("cpu", (2,)), ExpertParallel()
        ...     )
        ...     weights = torch.full((3, 1), 0.5, requires_grad=True)
        ...     out = experts(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), weights)
        ...     return balance_loss(experts).item()
        >>> run_ranks(2, program)[0]  # all rows to one of two experts, with weight 0.5
        1.0
    """
    counts, weights, rows, extra = [], [], [], []
    found = _experts_in(model)
    if router_logits is not None and len(router_logits) != len(found):
        raise ValueError(f"there are {len(found)} routers, got logits of {len(router_logits)}")
    for number, (name, experts) in enumerate(found):
        seen = experts.taken_balances()
        if not seen:
            raise ValueError(
                f"{name} has made no forward with gradients since the last balance_loss(), or the "
                f"backward has run: call balance_loss after the model and before backward()"
            )
        weight = torch.stack([each.weight for each in seen]).sum(0)
        if router_logits is not None:
            weight, more = _probabilities(router_logits[number], seen, name, experts)
            extra.append(more)
        elif seen[0].top == 1 and all(_is_constant(each) for each in seen):
            raise ValueError(
                f"each row gave {name} a single expert with weight 1: the balance loss would be "
                f"constant. Pass router_logits"
            )
        counts.append(torch.stack([each.counts for each in seen]).sum(0))
        weights.append(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        rows.append(sum(each.rows for each in seen))
    lengths = list(map(len, counts))
    total = _reduced(
        torch.cat([torch.cat(counts), counts[0].new_tensor(rows + extra)]), seen[0], mesh
    )
    if wrong := total[sum(lengths) + len(rows) :].nonzero().flatten().tolist():
        raise ValueError(
            f"router_logits of {[found[each][0] for each in wrong]} are not those of all rows "
            f"since the last balance_loss(): concatenate the logits of all these forwards"
        )
    share = _reduced(torch.cat(weights), seen[0], mesh)
    parts = zip(
        torch.split(total[: sum(lengths)], lengths),
        torch.split(share, lengths),
        total[sum(lengths) : sum(lengths) + len(rows)],
        strict=True,
    )
    losses = [
        len(places) * (places / places.sum().clamp(min=1) * weight / n.clamp(min=1)).sum()
        for places, weight, n in parts
    ]
    return torch.stack(losses).mean()


def _is_constant(seen: _Balance) -> bool:
    return bool((seen.weight.detach() == seen.counts).all())


def _probabilities(
    logits: Tensor, seen: Sequence[_Balance], name: str, experts: _Experts
) -> tuple[Tensor, int]:
    """The sum of this rank's probabilities, and a number that adds up to 0 if no row is missing."""
    placements = seen[0].placements
    if placements is not None:  # of all forwards together: ranks may have other rows than in each
        rows = [Shard(0) if p.is_partial() else Replicate() for p in placements]
        whole = experts.axis.annotate(logits, experts.layout, f"router_logits of {name}")
        logits = whole.redistribute(placements=rows).to_local()
    more = len(logits) - sum(each.rows for each in seen)
    return logits.float().softmax(-1).sum(0), abs(more) if placements is None else more


def _reduced(vector: Tensor, seen: _Balance, mesh: DeviceMesh | None) -> Tensor:
    """The sum of a vector over the ranks that have other rows."""
    if seen.placements is not None:
        made = DTensor.from_local(vector, seen.mesh, seen.placements, shape=vector.shape)
        vector = made.full_tensor()
        if mesh is None:
            return vector
    over = mesh or seen.mesh
    group = over.axes_group(range(over.ndim))
    if seen.placements is not None and group.size() > 1:
        own = seen.mesh.axes_group(range(seen.mesh.ndim))
        if len(both := set(own.global_ranks).intersection(group.global_ranks)) > 1:
            raise ValueError(
                f"ranks {sorted(both)} of mesh={over} share an axis of {seen.mesh}, where rows are "
                f"replicated or DTensors, and counted already: pass the other axes only"
            )
    return all_reduce(vector, "sum", group)


@dataclass(frozen=True)
class ExpertLoad:
    """The rows that a module's experts took in the last forward, over the ranks of the axis.

    Args:
        name: The module's name.
        rows: Rows by expert.
        ranks: Rows by rank of the axis.
        dropped: Places that no expert took, for lack of capacity.
    """

    name: str
    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    dropped: int

    @property
    def imbalance(self) -> float:
        """Rows of the rank with most, divided by the mean; 1 is even."""
        return max(self.ranks) * len(self.ranks) / max(sum(self.ranks), 1)


@dataclass(frozen=True)
class ExpertReport:
    """The loads of all modules of experts; as text, a table."""

    layers: tuple[ExpertLoad, ...]

    def __str__(self) -> str:
        titles = ("experts", "rows by expert", "rows by rank", "most / mean", "dropped")
        rows = [
            (
                each.name,
                " ".join(map(str, each.rows)),
                " ".join(map(str, each.ranks)),
                f"{each.imbalance:.2f}",
                str(each.dropped),
            )
            for each in self.layers
        ]
        return str(Page(TextTable(titles, rows, {3, 4})))


def expert_report(model: nn.Module) -> ExpertReport:
    """The rows by expert and rank in the last forward of each module of experts. Local.

    Args:
        model: A model with modules of :class:`ExpertParallel`.

    Raises:
        ValueError: There is none, or no forward was made.

    Example:
        >>> import torch
        >>> from tilework.dtensor import init_device_mesh
        >>> from tilework.parallel import ExpertParallel, expert_report, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> class Identity(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(2, 1))  # of two experts
        ...
        ...     def forward(self, rows, experts, weights):
        ...         return rows * self.weight[experts[:, 0]] * weights
        >>> def program(rank):
        ...     experts = parallelize_module(
        ...         Identity(), init_device_mesh("cpu", (2,)), ExpertParallel()
        ...     )
        ...     weights = torch.full((3, 1), 0.5, requires_grad=True)
        ...     out = experts(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), weights)
        ...     return expert_report(experts).layers[0].rows
        >>> run_ranks(2, program)[0]
        (6, 0)
    """
    loads = []
    for name, experts in _experts_in(model):
        if experts.last is None:
            raise ValueError(f"{name} has made no forward yet")
        routed, sent = experts.last.routed, experts.last.sent
        rows = tuple(map(sum, zip(*sent, strict=True)))
        offsets, sizes = chunk_offsets(len(rows), len(sent)), chunk_sizes(len(rows), len(sent))
        ranks = tuple(sum(rows[o : o + n]) for o, n in zip(offsets, sizes, strict=True))
        loads.append(ExpertLoad(name, rows, ranks, sum(map(sum, routed)) - sum(rows)))
    return ExpertReport(tuple(loads))
