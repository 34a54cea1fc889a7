"""The parameters of one call of fully_shard: sharded, being gathered, or gathered.

The modules' ``_parameters`` are the one truth, and always hold the sharded DTensors. While a unit
is *gathered* the full tensors stand in the modules' ``__dict__``, where attribute access finds them
first. Therefore ``module.weight`` is the full tensor in forward, while ``parameters()``, state
dicts and optimizers never see it. Full tensors are derived from the parameters that the modules
hold. These are compared before each use: parameters that were assigned, cast, tied or swapped are
then taken over.

=========== ============================== ==========================================
phase       full tensors                   left by
=========== ============================== ==========================================
sharded     none                           start_gather
gathering   collectives are under way      gather, reshard
gathered    in memory; installed or not    reshard
=========== ============================== ==========================================
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import all_reduce, span
from tilework.comm.per_call.internal import current_recorder, lacks_memory
from tilework.comm.provenance_digest import OF_A_UNIT, carrying
from tilework.dtensor import DTensor
from tilework.dtensor.internal import (
    DTensorSpec,
    carried,
    defer_grad,
    deferred_grad,
    digest_of,
    stable_digest,
    wrap,
    writes_beside,
)
from tilework.layout import Shard
from tilework.mesh import DeviceMesh
from tilework.parallel.data_parallel.arguments import cast_floats
from tilework.parallel.data_parallel.outputs import tensors_of
from tilework.parallel.fully_sharded.flat import Flat, Gathering, Message, gather
from tilework.parallel.fully_sharded.gather_nodes import Saving, can_save, outside_transforms
from tilework.parallel.fully_sharded.policies import MixedPrecisionPolicy, Purpose, Reduction
from tilework.parallel.fully_sharded.reducing import Made, Node, reduced
from tilework.parallel.fully_sharded.sharded_param import ShardedParam
from tilework.parallel.fully_sharded.taking_over import ModuleTables, OwningUnit, take_over
from tilework.parallel.passes import is_due

_engine: Any = torch.autograd.Variable._execution_engine
_local_of = attrgetter("_local_tensor")
_spec_of, _dtype_of = attrgetter("_spec"), attrgetter("dtype")
_version_of, _address_of = attrgetter("_version"), Tensor.data_ptr
_is_on_meta, _full_bytes = attrgetter("is_meta"), attrgetter("full_bytes")

#: Units are gathered together up to so many bytes of full parameters.
TOGETHER_BYTES = 256 << 10


class GatheredParameters:
    """Full parameters of a unit, and the shards that they were gathered from."""

    def __init__(
        self,
        unit: Unit,
        flats: list[Flat],
        parts: list[Gathering],
        messages: list[Message],
        together: list[Unit],
    ) -> None:
        self.flats, self.parts, self.version = flats, parts, unit._version()
        #: The units that were gathered with this, and all messages under way. These are finished
        #: together: common memory counts writes in common.
        self.together, self.messages = together, messages
        self.is_ready = False
        #: The forward pass that has compared the shards; None: no pass has.
        self.seen_by: Any = _running.run
        #: Made by the forward of another unit for that of this unit, which takes it.
        self.made: Made | None = None

    def finish(self) -> None:
        """Wait until the full parameters are in memory."""
        for message in self.messages:
            message.finish()
        self.messages.clear()
        self.is_ready = True

    @property
    def fulls(self) -> list[tuple[ShardedParam, Tensor]]:
        """The parameters, each with the full local tensor."""
        return [
            pair for part in self.parts for pair in zip(part.flat.params, part.fulls, strict=True)
        ]


class Use:
    """A forward pass of a unit, as long as autograd keeps saved tensors of the pass."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.flats = unit, unit.flats
        #: The full parameters, while they are in memory.
        self.gathered: GatheredParameters | None = None
        self.is_again = torch._C._current_graph_task_id() != -1  # a checkpoint recomputes
        self.is_outermost = _running.run is None
        if self.is_outermost:
            _running.run = Run([] if self.is_again else unit._order)
        #: The forward pass of the outermost unit, and the place within that pass.
        self.run: Run = _running.run  # type: ignore[assignment]
        self.number = len(self.run.uses)
        #: True if what autograd saves stands for full parameters; else they stay in memory.
        self.saves = can_save()
        self.saving: Saving | None = None
        #: The units that forward installs.
        self.shown: list[Unit] = []

    def units_before(self) -> Iterator[Unit]:
        """The units that the pass used before, the last first, as far as none is in memory."""
        for each in reversed(self.run.uses[: self.number]):
            use = each()
            if use is None or use.gathered is not None or use.flats is not use.unit.flats:
                return
            yield use.unit

    def full(self) -> GatheredParameters:
        """The full parameters in backward. Collective if they are not in memory."""
        if self.gathered is None:
            with outside_transforms():
                self.gathered = self.unit.gather_for(self)
        return self.gathered


class Run:
    """A forward pass of an outermost unit: the units within, in the order of their use."""

    def __init__(self, before: list[Unit]) -> None:
        self.units: list[Unit] = []
        self.uses: list[weakref.ref[Use]] = []
        #: The units of the last pass, which are gathered ahead as long as the order is the same.
        self.before = before

    def next_units(self) -> list[Unit]:
        """The units that came next in the last pass, if this pass has had the same order so far."""
        at = len(self.units)
        return self.before[at:] if self.units == self.before[:at] else []


class BackwardPass:
    """A backward pass, kept by autograd's engine; frees at the end what it has gathered."""

    def __init__(self) -> None:
        #: The units that the pass has gathered, each with the uses at that time.
        self.units: dict[Unit, list[weakref.ref[Use]]] = {}

    def end(self) -> None:
        """Free what was gathered. Idempotent; local."""
        units, self.units = self.units, {}
        for unit, uses in units.items():
            unit._end_backward(uses)

    __del__ = end


class _Running(threading.local):
    """The units whose forward passes run in a thread, and backward passes under way."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.stack: list[Unit] = []
        self.passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


_running = _Running()


def is_in_forward() -> bool:
    """True within the forward pass of a module that fully_shard has sharded, in this thread."""
    return _running.run is not None


@contextmanager
def as_program(units: Sequence[Unit]) -> Iterator[None]:
    """A context for recording, in which each pass gathers and reduces all. Collective."""
    settings = [(unit.reduction, replace(unit.reduction)) for unit in units]
    for unit in units:
        unit.reduce_deferred()
        unit.reshard()
        unit.reduction.is_due = unit.reduction.reduces_replicas = True
    try:
        yield
    finally:
        for now, before in settings:
            now.is_due, now.reduces_replicas = before.is_due, before.reduces_replicas


class Unit:
    """The parameters of one call of fully_shard, and when they are gathered and freed."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        placement: Callable[[nn.Parameter], Shard | None] | None,
        ignored: Iterable[nn.Parameter],
    ) -> None:
        self.modules = list(modules)
        name = ", ".join(type(module).__name__ for module in modules)
        self.owner = OwningUnit(name, mesh, policy, placement)
        self.tables = ModuleTables(self.modules, ignored)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.reduction = Reduction()
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.params: list[ShardedParam] = []
        self.flats: list[Flat] = []
        self._shown: Any = None
        #: The number of times that the parameters were gathered; the same on all ranks.
        self._gathers = 0
        self._known_as, self._text = 0, ""
        self._depth = 0
        self._around: tuple[Unit, ...] = ()
        self._task = -1
        self._order: list[Unit] = []
        self._gathered: GatheredParameters | None = None
        #: The parameters that attribute access finds full.
        self._installed: list[ShardedParam] = []
        self._written: list[int] = []
        #: Gradients of full parameters that no collective has reduced yet.
        self._deferred: dict[ShardedParam, Tensor | None] = {}

    @property
    def phase(self) -> str:
        """The state of the full parameters."""
        if self._gathered is None:
            return "sharded"
        return "gathered" if self._gathered.is_ready else "gathering"

    # -- the modules' parameters ---------------------------------------------------------------

    def look(self) -> None:
        """Take over parameters that have changed since the last look. Collective if any are new."""
        self.owner.check_former()
        if self.tables.is_current() and self._is_shown():
            return
        self.reshard()
        with torch.inference_mode(False):
            self.flats = take_over(self.tables, self.params, self.owner)
        self.params = [param for flat in self.flats for param in flat.params]
        self.tables.note()
        names = [param.name for param in self.params]
        self._known_as = stable_digest(self.owner.name, names)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self._text = f"{self.owner.name} ({names[0]}{more})" if names else self.owner.name
        self._shown = self._shown_now()

    def _shown_now(self) -> tuple[list[int], list[torch.dtype], list[DTensorSpec]] | None:
        """The addresses, dtypes and layouts of the shards now, by which changes are noticed."""
        sharded = [param.sharded for param in self.params]
        if set(map(type, sharded)) - {DTensor}:
            return None
        locals_ = list(map(_local_of, sharded))
        return (
            list(map(_address_of, locals_)),
            list(map(_dtype_of, locals_)),
            list(map(_spec_of, sharded)),
        )

    def _is_shown(self) -> bool:
        """True unless a shard has changed since the last look. All ranks agree."""
        now, before = self._shown_now(), self._shown
        return now is not None and now == before and all(map(is_, now[2], before[2]))

    def _version(self) -> int:
        counted: int = sum(map(_version_of, self.shards()))
        return counted + writes_beside(param.sharded for param in self.params)

    def shards(self) -> list[Tensor]:
        """This rank's shards: leaves of the graph; raises if a parameter was swapped since."""
        sharded = [param.sharded for param in self.params]
        if set(map(type, sharded)) - {DTensor}:
            return [param.local for param in self.params]
        return list(map(_local_of, sharded))

    # -- phases ------------------------------------------------------------------------------

    def start_gather(self, async_op: bool = True, after: Iterable[Unit] = ()) -> None:
        """Start to gather, with small units that come ``after``, unless done. Collective."""
        if self._gathered is None:
            together = [self, *self._small(after)]
            made = _gathered_together([(unit, unit.flats) for unit in together], async_op)
            units = _units_of_pass()
            for unit, gathered in zip(together, made, strict=True):
                unit._gathered = gathered
                units.setdefault(unit, [])

    def _small(self, after: Iterable[Unit]) -> Iterator[Unit]:
        """The first of the units ``after`` that fit into a message with this unit."""
        room, seen = TOGETHER_BYTES - self._full_bytes(), {self}
        for unit in after:
            if room < 0 or unit.owner.shard_group is not self.owner.shard_group:
                return
            if unit not in seen and unit._gathered is None:
                seen.add(unit)
                if torch._C._current_graph_task_id() == -1:
                    unit.look()
                room -= unit._full_bytes()
                if room >= 0:
                    yield unit

    def _full_bytes(self) -> int:
        return sum(map(_full_bytes, self.flats))

    def gather(self, after: Iterable[Unit] = ()) -> GatheredParameters:
        """Gather the full parameters, unless in memory, and return them. Collective; blocks."""
        self.start_gather(async_op=False, after=after)
        assert self._gathered is not None
        if not self._gathered.is_ready:
            self._gathered.finish()
        return self._gathered

    def unshard(self) -> None:
        """Gather, and let attribute access find full parameters. Collective; blocks."""
        if not self._installed:
            self.gather()
            self._install()

    def _check_memory(self, flats: Sequence[Flat]) -> None:
        if any(lacks_memory(shard) for flat in flats for shard in flat.shards):
            raise RuntimeError(
                f"parameter {self.params[0].name} of {self.owner.name} is on the meta device: call "
                f"to_empty(device=...) and initialise it, or load a state dict with assign=True"
            )

    def text_with(self, more: int) -> str:
        """The unit's name, and the number of small units that travel with it."""
        return f"{self._text} with {more} small units after it" if more else self._text

    def digest(self, *numbers: int) -> int:
        """A digest of ``numbers`` and of the unit's parameters."""
        return hash(
            (self._known_as, *numbers, *[digest_of(param.sharded) for param in self.params])
        )

    def reshard(self) -> None:
        """Leave only shards to the modules, unless forward runs. Local."""
        if self._depth:
            return
        if self._installed:
            self._uninstall()
        if self._gathered is not None and not self._gathered.is_ready:
            self._gathered.finish()  # a collective still writes to the memory
        self._gathered = None

    def _install(self) -> None:
        """Let attribute access find the full parameters, with a new node in the graph. Local."""
        assert self._gathered is not None
        pairs = self._gathered.fulls
        results = self._results(self._gathered) if torch.is_grad_enabled() else repeat(None)
        for (param, full), result in zip(pairs, results, strict=False):
            value: Any = full.detach() if result is None else result
            if param.tensor_parallel is not None:
                value = wrap(value, param.tensor_parallel, digest_of(param.sharded))
            attributes = vars(param.sharded)
            for key in [key for key in attributes if key[:1] != "_"]:
                vars(value)[key] = attributes[key]
            for module, name in param.places:
                vars(module)[name] = value
        self._installed, self._task = [p for p, _ in pairs], torch._C._current_graph_task_id()
        if self.tables.recurrent:
            self._show_recurrent()

    def _results(self, gathered: GatheredParameters) -> list[Tensor | None]:
        """Full parameters as results of a node, perhaps with those of units that come next."""
        made = gathered.made
        run = _running.run
        if made is None or made.node.run is not run or not made.is_of(self.shards()):
            others = [  # gathered with this unit, and without a node for the forward to come
                (unit, own)
                for unit in gathered.together
                if (own := unit._gathered) is not None
                and own is not gathered
                and own.together is gathered.together
                and not (unit._installed or (own.made and own.made.node.run is run))
            ]
            Node([(self, gathered), *others], run)
            made = gathered.made
        assert made is not None
        gathered.made = None
        made.node.users.add(self)
        return made.results

    def _writes(self) -> list[int]:
        """For each of the flats, the number of writes to the full parameters that torch counts."""
        return [] if self._gathered is None else [p.block._version for p in self._gathered.parts]

    def _uninstall(self) -> None:
        for param in self._installed:
            for module, name in param.places:
                vars(module).pop(name, None)
        self._installed = []
        if self.tables.recurrent:
            self._show_recurrent()

    def _show_recurrent(self) -> None:
        """Update the lists of weights that recurrent layers keep."""
        for module in self.tables.recurrent:
            names = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]

    # -- forward -----------------------------------------------------------------------------

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module's forward pass with full parameters. Collective."""
        policy, use = self.owner.policy, None
        with span(self._text):
            if not self._depth:
                use = Use(self)
            try:
                if use is not None:
                    with outside_transforms():
                        self._enter(use)
                self._depth += 1
                try:
                    if policy.param_dtype is not None and policy.cast_forward_inputs:
                        args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
                    output = call(*args, **kwargs)
                    self._check_unwritten()
                finally:
                    self._depth -= 1
            finally:
                if use is not None:
                    self._leave(use)
        if policy.output_dtype is not None:
            output = cast_floats(output, policy.output_dtype)
        if use is not None and torch.is_grad_enabled():
            self._watch(output, use)
        return output

    def _enter(self, use: Use) -> None:
        """Gather and install the full parameters of a forward pass. Collective."""
        run, again = use.run, use.is_again
        if again:
            self._join_backward()
            self.look()
            self._drop_stale()
        else:
            self._around = tuple(_running.stack)
            self._look_before(run)
        ahead = () if again else run.next_units()
        gathered = self.gather(ahead[1:] if ahead and ahead[0] is self else ())
        gathered.seen_by = run
        use.gathered, use.flats = gathered, gathered.flats
        run.units.append(self)
        run.uses.append(weakref.ref(use))
        use.shown.append(self)
        self._install()
        self._written = self._writes()
        if not again:
            _gather_ahead(self.forward_prefetch, iter(run.next_units()))
        if self.tables.encoders:
            self._show_first_layers(use)
        if torch.is_grad_enabled() and gathered.parts and use.saves:
            use.saving = Saving(use, gathered.parts)
        _running.stack.append(self)

    def _leave(self, use: Use) -> None:
        """Undo what :meth:`_enter` did, as far as it came. Local."""
        frees = self.reshard_after_forward
        if (not use.is_outermost if frees is None else frees) or use.is_again:
            use.gathered = None
        if use.saving is not None:
            use.saving.end()
            use.saving = None
        if _running.stack[-1:] == [self]:
            _running.stack.pop()
        try:
            while use.shown:
                use.shown.pop()._clean()
        except BaseException:
            for unit in use.shown:  # a gather under way has failed
                unit._uninstall()
            raise
        finally:
            if use.is_outermost:
                self._end_run(use.is_again)

    def _look_before(self, run: Run) -> None:
        """Before forward: take over changed parameters, drop full ones out of date. Collective."""
        self.look()
        gathered = self._gathered
        if gathered is None or not gathered.parts:
            return
        if gathered.seen_by is not run:
            self._drop_if_changed(gathered)
        else:
            self._drop_stale()  # written since it was gathered ahead

    def _drop_if_changed(self, gathered: GatheredParameters) -> None:
        """Drop full parameters if any rank's shard values have changed. Collective."""
        gathered.finish()
        changed = gathered.version != self._version() or any(self._differing(gathered.fulls))
        flag = torch.tensor([float(changed)], device=self.flats[0].device)
        all_reduce(flag, ReduceOp.MAX, self.owner.shard_group)
        if flag.item():
            self.reshard()

    def _show_first_layers(self, use: Use) -> None:
        """Install the weights that torch's encoders read before they call a layer. Collective."""
        layers = [encoder.layers[0] for encoder in self.tables.encoders]
        modules = [module for layer in layers if not layer.training for module in layer.modules()]
        units: list[Unit | None] = [vars(module).get("_fsdp_state") for module in modules]
        for unit in dict.fromkeys(units):
            if unit is None or unit is self:
                continue
            if use.is_again:
                unit._join_backward()
            unit._look_before(use.run)
            unit.gather().seen_by = use.run
            unit._install()
            use.shown.append(unit)

    def _check_unwritten(self) -> None:
        """Raise if forward wrote to a shard unseen, or to a full parameter, which is lost."""
        gathered = self._gathered
        if self._depth > 1 or not self._installed or gathered is None:
            return
        addresses = list(map(_address_of, self.shards()))
        if gathered.version != self._version() or addresses != self._shown[0]:
            if names := ", ".join(self._differing(gathered.fulls)):
                raise RuntimeError(
                    f"forward of {self.owner.name} wrote to {names} after these parameters were "
                    f"gathered, and computed with the former values: write before this forward, or "
                    f"call fully_shard on the inner module, and write before that is called"
                )
        elif self._writes() != self._written or (
            current_recorder() is None  # a program would branch on values in each call
            and is_due((self._gathers + 1) // 2)
            and any(self._differing(self._shown_fulls()))
        ):
            raise RuntimeError(
                f"forward of {self.owner.name} wrote to a parameter in place: the full tensor is "
                f"there for forward alone, and the write would be lost. Write between steps, to "
                f"the parameter that named_parameters() has"
            )

    def _shown_fulls(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        for param in self._installed:
            value: Any = getattr(*param.places[0])
            yield param, getattr(value, "_local_tensor", value)

    def _differing(self, pairs: Iterable[tuple[ShardedParam, Tensor]]) -> Iterator[str]:
        """The names of parameters of whose full tensor this rank's shard differs. Local."""
        rank = self.owner.shard_group.rank()
        for param, full in pairs:
            mine, shown = param.local.to(full.dtype), param.of_full(full, rank)
            if not torch.equal(mine, shown) and not torch.allclose(
                mine, shown, rtol=0, atol=0, equal_nan=True
            ):
                yield param.name

    def _clean(self) -> None:
        """After forward (unless it is a repetition), uninstall the full parameters. Local."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.reshard_after_forward is False:
            self._uninstall()
        else:
            self.reshard()

    def _end_run(self, again: bool) -> None:
        """End the outermost forward; unless it comes ``again``, remember the units' order."""
        run, _running.run = _running.run, None
        assert run is not None
        if not again:
            self._order = run.units
        for unit in dict.fromkeys(run.before):
            if unit.phase == "gathering" and unit not in run.units:
                unit.reshard()

    # -- backward ----------------------------------------------------------------------------

    def _watch(self, output: Any, use: Use) -> None:
        """Make backward gather at an output of forward, before saved tensors ask for it."""
        of = weakref.ref(use) if use.saves else lambda: use

        def begin(_: Any) -> None:
            with outside_transforms():
                self._begin_backward(of())

        for tensor in (output,) if type(output) is Tensor else tensors_of(output):
            node: Any = getattr(tensor, "_local_tensor", tensor).grad_fn
            if node is not None:
                node.register_prehook(begin)

    def _join_backward(self) -> None:
        """Free this unit's parameters after backward, and other units' parameters now."""
        units = _units_of_pass()
        for unit in [each for each in units if each._installed]:
            if unit is not self and unit not in self._around:
                unit._release()
        units.setdefault(self, [])

    def _begin_backward(self, use: Use | None) -> None:
        """Gather and install full parameters when backward comes here. Collective."""
        self._join_backward()
        if self._installed or not self.unshards_in_backward:
            return
        if use is None or use.flats is not self.flats or not (use.saves or use.gathered):
            # Autograd has saved nothing of these parameters, but a checkpoint may recompute.
            self._drop_stale()
            self.gather(() if use is None else use.units_before())
        else:
            gathered = use.full()
            if self._gathered is not gathered:
                self.reshard()
                self._gathered = gathered
            if not use.saves:
                use.gathered = None
        with torch.enable_grad():
            self._install()

    def gather_for(self, use: Use) -> GatheredParameters:
        """The full parameters of a forward pass, for the pass's backward. Collective."""
        if use.flats is not self.flats:  # the modules have new buffers since, and show them
            for flat in use.flats:
                flat.check_dtype()
            (gathered,) = _gathered_together([(self, use.flats)])
            gathered.finish()
        else:
            self._drop_stale()
            gathered = self.gather(use.units_before())
            if not self._installed:
                self._gathered = None  # saved tensors keep it
        _units_of_pass().setdefault(self, []).append(weakref.ref(use))
        _gather_ahead(self.backward_prefetch, use.units_before())
        return gathered

    def _drop_stale(self) -> None:
        if self._gathered is not None and self._gathered.version != self._version():
            self.reshard()

    def _release(self) -> None:
        """Free the parameters that backward has installed, unless autograd saved them. Local."""
        if self._installed and not self._depth:
            self._uninstall()
            if self.reshard_after_backward:
                self.reshard()

    def _end_backward(self, uses: Iterable[weakref.ref[Use]]) -> None:
        """At the end of a backward pass, free the parameters that it gathered. Local."""
        self._release()
        if self.reshard_after_backward:
            self.reshard()
        for each in uses:
            use = each()
            if use is not None:
                use.gathered = None

    # -- gradients that wait -----------------------------------------------------------------

    def due(self, pairs: Sequence[tuple[ShardedParam, Tensor | None]]) -> dict[int, Tensor | None]:
        """The gradients to reduce, by id of the parameter; empty if they are to wait. Local."""
        if self._task == torch._C._current_graph_task_id():  # not a pass within a checkpoint's
            self._release()
        if self._deferred:
            pairs = [(param, self._with_deferred(param, grad)) for param, grad in pairs]
        how = self.reduction
        if how.is_due and (how.reduces_replicas or self.owner.replicate_group is None):
            return {id(param): grad for param, grad in pairs}
        for param, grad in pairs:
            self._deferred[param] = grad  # also None: other ranks may have a gradient
            defer_grad(param.sharded, self.reduce_deferred)
        return {}

    def _with_deferred(self, param: ShardedParam, grad: Tensor | None) -> Tensor | None:
        deferred = self._deferred.pop(param, None)
        is_cleared = deferred_grad(param.sharded) is None
        defer_grad(param.sharded, None)
        waits = None if is_cleared else deferred
        return grad if waits is None else waits if grad is None else waits + grad

    def reduce_deferred(self) -> None:
        """Reduce the gradients that wait, and add them to the shards' gradients. Collective."""
        params = [param for param in self.params if param in self._deferred]
        now = self.reduction
        self.reduction = replace(now, is_due=True, reduces_replicas=True)
        try:
            with torch.no_grad():
                shards = reduced([(self, self.flats, [(param, None) for param in params])])
        finally:
            self.reduction = now
        pairs = [(p.local, s) for p in params if (s := shards[id(p)]) is not None]
        trained = [pair for pair in pairs if pair[0].requires_grad]
        if trained:  # autograd calls hooks
            locals_, grads = zip(*trained, strict=True)
            torch.autograd.backward(locals_, grads)
        for local, shard in pairs:
            if not local.requires_grad:  # frozen since
                local.grad = shard if local.grad is None else local.grad + shard

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """The unit of the modules' copies, which takes over parameters at the next look."""
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.modules = copy.deepcopy(self.modules, memo)
        copied.owner = replace(self.owner)
        copied.tables = self.tables.of_copies(copied.modules, memo)
        copied.params = [
            replace(
                param,
                places=[(copy.deepcopy(module, memo), name) for module, name in param.places],
                sharded=copy.deepcopy(param.sharded, memo),
            )
            for param in self.params
        ]
        copied.reduction = replace(self.reduction)
        copied.forward_prefetch = copied.backward_prefetch = None
        copied.flats, copied._shown, copied._order = [], None, []
        copied._gathered, copied._deferred = None, {}
        copied._depth, copied._installed = 0, []
        return copied


def _gather_ahead(named: list[Unit] | None, after: Iterator[Unit]) -> None:
    """Start to gather the units that the program named, or else those that come next."""
    for unit in islice(after, 1) if named is None else named:
        if unit._gathered is None:
            if torch._C._current_graph_task_id() == -1:
                unit.look()
            unit.start_gather(after=after if named is None else ())


def _gathered_together(
    units: Sequence[tuple[Unit, list[Flat]]], async_op: bool = False
) -> list[GatheredParameters]:
    """Full parameters of units, whose digests ranks compare. Collective."""
    in_backward = torch._C._current_graph_task_id() != -1
    for unit, flats in units:
        if any(map(_is_on_meta, flats)):
            unit._check_memory(flats)
        unit._gathers += 1
    first, digests = units[0][0], [unit.digest(unit._gathers, in_backward) for unit, _ in units]
    where = "backward" if in_backward else "forward"
    text, together = first.text_with(len(units) - 1), [unit for unit, _ in units]
    what = Purpose(f"gather {first._gathers} of {text} {OF_A_UNIT} {where}")
    outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with outside, carrying(carried(hash(tuple(digests))), what):
        made, messages = gather([flat for _, flats in units for flat in flats], async_op)
        parts = iter(made)
        return [
            GatheredParameters(unit, flats, [next(parts) for _ in flats], messages, together)
            for unit, flats in units
        ]


def _units_of_pass() -> dict[Unit, list[weakref.ref[Use]]]:
    """The units that the backward pass under way has gathered, and their uses at that time."""
    task = torch._C._current_graph_task_id()
    if task == -1:  # a program reads a node's saved tensors
        return {}
    current = _running.passes.get(task)
    if current is None:
        current = _running.passes[task] = BackwardPass()
        _engine.queue_callback(current.end)
    return current.units
