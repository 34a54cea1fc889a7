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
from itertools import islice
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
from tilework.parallel.tensor_parallel.styles import Style
from tilework.show import Page, Shown, TextTable

_NAME = "expert_parallel"
_TAKEN = "rows [n, features], experts [n, k] and weights [n, k]"
#: The most rows with which the module is tried.
_TRIED = 8


class ExpertParallel(Style):
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
            is out of range, a weight is NaN, or the module does something else than to add up. That
            is tried in the first forwards, and in some later ones, with a few of a rank's rows and
            experts, in the module's eval mode: two experts of a row, weighed, must give the sum of
            each expert's result, up to rounding.
        CollectiveMismatchError: By ``parallelize_module``: ranks have other arguments.
    """

    def __init__(
        self, dispatch: Literal["rows", "replicate"] = "rows", capacity: float | None = None
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
            raise ValueError(
                f"{type(module).__name__} has a style already: {vars(module)[_NAME].style}"
            )
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
        forward = module.forward

        def plain(_: nn.Module, *inputs: Any) -> Any:
            return forward(*inputs)

        function = forward.__func__ if isinstance(forward, MethodType) else plain
        vars(module)[_NAME] = _Experts(self, axis, function)
        module.forward = MethodType(_forward, module)  # a deep copy's is bound to the copy


def _forward(module: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    experts: _Experts = vars(module)[_NAME]
    bound = inspect.signature(experts.function).bind(module, *inputs, **named)
    values = [*bound.args[1:], *bound.kwargs.values()]
    if len(values) != 3 or not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"{experts.axis.layer} takes {_TAKEN}, got {[type(value).__name__ for value in values]}"
        )
    return experts.run(module, (values[0], values[1], values[2]))


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


#: Rows, the experts of each row, and their weights.
_Given = tuple[Tensor, Tensor, Tensor]
#: Numbers of rows by rank and expert.
_Counts = list[list[int]]


@dataclass
class _Experts:
    """The experts of a module on the ranks of an axis."""

    style: ExpertParallel
    axis: MeshAxis
    #: The module's forward, for any rows and experts.
    function: Callable[..., Any]
    #: Of the last forward: the rows that went to each expert, and those that were dropped.
    last: tuple[_Counts, int] | None = None
    #: The number of forwards.
    calls: int = 0
    balances: list[weakref.ref[_Balance]] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> _Experts:
        return _Experts(self.style, self.axis, self.function)

    @property
    def layout(self) -> Placement:
        """The placement of a plain tensor along the axis."""
        return Replicate() if self.style.dispatch == "replicate" else Shard(0)

    def run(self, module: nn.Module, given: _Given) -> Tensor:
        self._check(module, *given)
        rows = given[0]
        plain = not isinstance(rows, DTensor)
        if plain and self.style.dispatch == "rows" and self.axis.mesh.ndim == 1:
            return self._local(module, given, None)
        whole = [
            self.axis.annotate(each, self.layout, f"{name} of {self.axis.layer}")
            for each, name in zip(given, ("rows", "experts", "weights"), strict=True)
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
        mine, ids, weights = (each.to_local() for each in moved)
        with carrying(hash(tuple(map(digest_of, whole))), self.axis.layer, whole[1]):
            local = self._local(module, (mine, ids, weights), placements)
        made = DTensor.from_local(local, self.axis.mesh, placements, shape=rows.shape)
        result = made.redistribute(placements=back)
        return self.axis.to_local(result) if plain else result

    def _check(self, module: nn.Module, rows: Tensor, ids: Tensor, weights: Tensor) -> None:
        shapes = rows.shape, ids.shape, weights.shape
        if [*map(len, shapes)] != [2, 2, 2] or ids.shape != weights.shape or len(ids) != len(rows):
            raise ValueError(f"{self.axis.layer} takes {_TAKEN}, got {[*map(list, shapes)]}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"the experts of rows are integers, got {ids.dtype}")
        if len({isinstance(each, DTensor) for each in (rows, ids, weights)}) > 1:
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
        self, module: nn.Module, given: _Given, placements: list[Placement] | None
    ) -> Tensor:
        rows, ids, weights = given
        (size, top), count = ids.shape, next(module.parameters()).shape[0]
        flat = ids.reshape(-1).long()
        group = self.axis.mesh.get_group(self.axis.number)
        rank, ranks = group.rank(), group.size()
        offsets, sizes = chunk_offsets(count, ranks), chunk_sizes(count, ranks)
        self.calls += 1
        wrong = is_due(self.calls) and sizes[rank] and not self._adds(module, given, placements)
        routed = self._exchanged_counts(flat, weights, count, (group, bool(wrong)))
        sent = _taken(routed, self.style.capacity)
        self.last = sent, sum(map(sum, routed)) - sum(map(sum, sent))
        kept = _kept(flat, sent[rank])
        mine = slice(offsets[rank], offsets[rank] + sizes[rank])
        outgoing = [sum(sent[rank][o : o + n]) for o, n in zip(offsets, sizes, strict=True)]
        incoming = [sum(row[mine]) for row in sent]
        # In backward the gradients of a row's places are summed in their order.
        places = rows.unsqueeze(1).expand(size, top, rows.shape[1]).flatten(0, 1)
        received = all_to_all_single(places.index_select(0, kept), incoming, outgoing, group)
        numbers = torch.arange(sizes[rank], device=flat.device, dtype=ids.dtype)
        times = torch.tensor([n for row in sent for n in row[mine]], dtype=torch.long)
        local_ids = numbers.repeat(len(sent)).repeat_interleave(times.to(flat.device))
        with self._local_weights(module, placements) as stacks:
            if len(received):
                unit = received.new_ones(len(received), 1)
                done = self.function(module, received, local_ids.unsqueeze(1), unit)
            else:  # weights have gradients of zeros, as on ranks with rows
                done = received + sum(w.flatten()[:0].sum() for w in stacks if w.requires_grad)
        if done.shape != received.shape:
            raise ValueError(
                f"{self.axis.layer} must return rows of the shape it takes, "
                f"{list(received.shape)}, got {list(done.shape)}"
            )
        back = all_to_all_single(done, outgoing, incoming, group)
        home = back.new_zeros(size * top, rows.shape[1]).index_copy(0, kept, back)
        shares = home.view(size, top, rows.shape[1]) * weights.unsqueeze(-1)
        result = shares.sum(1).to(rows.dtype)
        self._keep_balance(result, flat, weights, routed[rank], placements)
        return result

    def _adds(self, module: nn.Module, given: _Given, placements: list[Placement] | None) -> bool:
        """False if some rows' results are not sums of weight times an expert's result. Local.

        The module gets rows with two of this rank's experts each, and rows with a single expert.
        """
        rows, ids, weights = (each.detach() for each in given)
        if rows.is_meta:  # a pretended rank has no values
            return True
        few = rows[rows.any(1)][:_TRIED]  # zeros tell nothing
        few = few if len(few) else rows.new_ones(1, rows.shape[1])
        signs = [1, -1] if bool((weights < 0).any()) else [1]
        few, top = few.repeat(len(signs), 1), min(ids.shape[1], 2)
        factors = few.new_tensor([[2 * sign, sign] for sign in signs])[:, :top]
        factors = factors.repeat_interleave(len(few) // len(signs), 0)
        modes = {each: each.training for each in module.modules()}
        module.eval()  # nothing is drawn at random
        try:
            with torch.no_grad(), self._local_weights(module, placements, least=top) as stacks:
                numbers = torch.arange(len(few))[:, None] + torch.arange(top)
                numbers = (numbers % len(stacks[0])).to(ids.device, ids.dtype)
                alone = few.repeat_interleave(top, 0)
                single = self.function(
                    module, alone, numbers.reshape(-1, 1), alone.new_ones(len(alone), 1)
                )
                both = self.function(module, few.clone(), numbers, factors)
        finally:
            for each, mode in modes.items():
                each.training = mode
        if single.shape != alone.shape or both.shape != few.shape:
            return True  # raises when rows come
        parts = single.view(len(few), top, -1) * factors.unsqueeze(-1)
        eps = torch.finfo(both.dtype).eps
        room = min(64 * eps, eps**0.5) * parts.abs().sum(1).norm(dim=1)
        return not bool(((parts.sum(1) - both).norm(dim=1) > room).any())

    def _exchanged_counts(
        self, flat: Tensor, weights: Tensor, count: int, state: tuple[ProcessGroup, bool]
    ) -> _Counts:
        """The rows of each rank for each expert; raises on all ranks if a rank has bad numbers.

        ``state`` is the group, and True if this rank's results are not sums.
        """
        group, wrong = state
        bad = ((flat < 0) | (flat >= count)).sum()
        nan = bad.new_zeros(()) if weights.is_meta else weights.detach().isnan().sum()
        counts = torch.bincount(flat.clamp(0, count - 1), minlength=count)
        mine = [counts, bad.view(1), nan.view(1), counts.new_tensor([wrong])]
        lines: _Counts = (
            all_gather_tensor(torch.cat(mine), 0, group).view(-1, count + len(mine) - 1).tolist()
        )
        if ranks := [rank for rank, line in enumerate(lines) if line[-1]]:
            raise ValueError(
                f"{self.axis.layer} does not return, for a row, the sum of weight times the "
                f"expert's result (on ranks {ranks} of the axis). ExpertParallel calls it with a "
                f"single expert a row, weight 1, and weighs and adds up where rows came from: let "
                f"forward return the sum, and do the rest outside the module"
            )
        for column, what in ((-3, f"an expert's number outside 0 to {count - 1}"), (-2, "NaN")):
            if ranks := [rank for rank, line in enumerate(lines) if line[column]]:
                raise ValueError(
                    f"the router gave {self.axis.layer} {what} on ranks {ranks} of the axis"
                )
        return [line[:count] for line in lines]

    @contextmanager
    def _local_weights(
        self, module: nn.Module, placements: list[Placement] | None, least: int = 0
    ) -> Iterator[list[Tensor]]:
        """Let the module have this rank's experts, as plain tensors, and their number.

        If there are fewer than ``least``, another with negative weights is added.
        """
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
            if len(local) < least:
                is_number = local.is_floating_point() and local.itemsize > 1
                mine[name] = torch.cat([local, -local if is_number else local])
        stacks = list(mine.values())
        if isinstance(own.get("num_experts"), int):
            mine["num_experts"] = len(stacks[0])
        saved = {name: own[name] for name in mine if name in own}
        own.update(mine)
        try:
            yield stacks
        finally:
            for name in mine:
                del own[name]
            own.update(saved)

    # -- balance -----------------------------------------------------------------------------

    def _keep_balance(
        self,
        result: Tensor,
        flat: Tensor,
        weights: Tensor,
        routed: list[int],
        placements: list[Placement] | None,
    ) -> None:
        """Keep what :func:`balance_loss` needs, while the graph of the forward lives."""
        if result.grad_fn is None or not weights.requires_grad:
            return
        weight = weights.new_zeros(len(routed)).index_add(0, flat, weights.reshape(-1))
        if torch._C._current_graph_task_id() != -1:  # recomputed, and saved, for a checkpoint
            return
        at = placements and [Partial() if isinstance(e, Shard) else e for e in placements]
        counts, sizes = flat.new_tensor(routed), (len(weights), weights.shape[1])
        noted = _Balance(counts, weight, *sizes, self.axis.mesh, at or None)

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


def _summed(placements: list[Placement] | None, axis: int) -> Placement:
    """The layout of an expert's gradient along another axis: partial where it shards rows."""
    if placements is None or placements[axis].is_replicate():
        return Replicate()
    return Partial()


def _taken(routed: _Counts, capacity: float | None) -> _Counts:
    """The rows of each rank that each expert takes: the first, as many as it has room for."""
    if capacity is None:
        return routed
    count = len(routed[0])
    room, taken = [math.ceil(capacity * sum(map(sum, routed)) / count)] * count, []
    for row in routed:
        taken.append([*map(min, row, room)])
        room = [*map(int.__sub__, room, taken[-1])]
    return taken


def _kept(flat: Tensor, sent: Sequence[int]) -> Tensor:
    """The places that are sent, by expert: the first ``sent[expert]`` of each."""
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(sent))
    expert = flat[order]
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[expert]
    return order[place < torch.tensor(sent, device=flat.device)[expert]]


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
    model: nn.Module, router_logits: Sequence[Tensor] | None = None, mesh: DeviceMesh | None = None
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

    Example::

        loss = loss_of(model(rows)) + 0.01 * balance_loss(model)
        loss.backward()
    """
    found, numbers, weights, lengths = _experts_in(model), [], [], []
    if router_logits is not None and len(router_logits) != len(found):
        raise ValueError(f"there are {len(found)} routers, got logits of {len(router_logits)}")
    for number, (name, experts) in enumerate(found):
        seen = experts.taken_balances()
        if not seen:
            raise ValueError(
                f"{name} has made no forward with gradients since the last balance_loss(), or the "
                f"backward has run: call balance_loss after the model and before backward()"
            )
        weight, more = torch.stack([each.weight for each in seen]).sum(0), 0
        counts = torch.stack([each.counts for each in seen]).sum(0)
        if router_logits is not None:
            weight, more = _probabilities(router_logits[number], seen, name, experts)
        elif seen[0].top == 1 and bool((weight.detach() == counts).all()):
            raise ValueError(
                f"each row gave {name} a single expert with weight 1: the balance loss would be "
                f"constant. Pass router_logits"
            )
        rows = sum(each.rows for each in seen)
        numbers.append(torch.cat([counts, counts.new_tensor([rows, more])]))
        weights.append(weight.to(torch.promote_types(weight.dtype, torch.float32)))
        lengths.append(len(counts))
    total = torch.split(_reduced(torch.cat(numbers), seen[0], mesh), [n + 2 for n in lengths])
    if wrong := [name for (name, _), each in zip(found, total, strict=True) if each[-1]]:
        raise ValueError(
            f"router_logits of {wrong} are not those of all rows "
            f"since the last balance_loss(): concatenate the logits of all these forwards"
        )
    shares = torch.split(_reduced(torch.cat(weights), seen[0], mesh), lengths)
    losses = []
    for each, share in zip(total, shares, strict=True):
        places = each[:-2]
        even = places / places.sum().clamp(min=1)
        losses.append(len(places) * (even * share / each[-2].clamp(min=1)).sum())
    return torch.stack(losses).mean()


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
class ExpertReport(Shown):
    """The loads of all modules of experts; as text, a table."""

    layers: tuple[ExpertLoad, ...]

    def __rich__(self) -> Page:
        titles = ("experts", "rows by expert", "rows by rank", "most / mean", "dropped")
        rows = [
            (
                each.name,
                *(" ".join(map(str, numbers)) for numbers in (each.rows, each.ranks)),
                f"{each.imbalance:.2f}",
                str(each.dropped),
            )
            for each in self.layers
        ]
        return Page(TextTable(titles, rows, {3, 4}))


def expert_report(model: nn.Module) -> ExpertReport:
    """The rows by expert and rank in the last forward of each module of experts. Local.

    Args:
        model: A model with modules of :class:`ExpertParallel`.

    Raises:
        ValueError: There is none, or no forward was made.

    Example::

        print(expert_report(model))
    """
    loads = []
    for name, experts in _experts_in(model):
        if experts.last is None:
            raise ValueError(f"{name} has made no forward yet")
        sent, dropped = experts.last
        rows = tuple(map(sum, zip(*sent, strict=True)))
        left = iter(rows)
        ranks = tuple(sum(islice(left, n)) for n in chunk_sizes(len(rows), len(sent)))
        loads.append(ExpertLoad(name, rows, ranks, dropped))
    return ExpertReport(tuple(loads))
