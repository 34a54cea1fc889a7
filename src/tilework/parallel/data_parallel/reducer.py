"""The reduction of gradients, bucket by bucket, while backward continues.

Each parameter's post-accumulate hook marks a gradient as ready. A bucket starts when all gradients
of the bucket are ready and all buckets before it have started: by then the bucket's memory has all
of the gradients, and the core's thread averages it. The last bucket is averaged at once, because
nothing is left to compute beside it; so are all buckets where the ranks alone keep all processors
busy. At the end of the backward pass the reducer starts the remaining buckets with zeros, waits for
all of them, and makes the averages the gradients. All ranks therefore start the same buckets in the
same order in every pass, and no rank waits for another that has fewer gradients. The ranks compare
afterwards which gradients they had.

The scheme is that of S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
Training*, VLDB 2020.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tilework.comm.contract import ProcessGroup, ReduceOp, Work
from tilework.comm.operations.internal import agree, all_reduce, all_reduce_sparse, broadcast
from tilework.comm.per_call.internal import address_of, current_recorder, lacks_memory, unrecorded
from tilework.cores import has_spare_core
from tilework.parallel.comm_hooks.bucket import CommHook, GradBucket
from tilework.parallel.data_parallel.bucket_memory import BucketMemory
from tilework.parallel.data_parallel.buckets import BucketPlan, plan_buckets
from tilework.parallel.data_parallel.leaves import GradLeaf, grad_dtype_of
from tilework.parallel.data_parallel.outputs import accumulators
from tilework.parallel.data_parallel.replicas import HOOKS_COME_FIRST, Replica
from tilework.parallel.data_parallel.report import BucketTimes, PassTimes, StepReport, step_report

#: What ``then`` of torch's futures returns is typed as the base class.
_AnyFuture: Any = torch._C.Future
_engine: Any = torch.autograd.Variable._execution_engine
#: Other programs want the cores if a backward pass gets less than this share of the time; in every
#: so many passes this is measured again.
_LEAST_SHARE, _LOOK_EVERY = 0.9, 16


class _PassEnd:
    """The end of a pass, called by autograd's engine, which drops it if backward raises."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer: Reducer | None = reducer
        self._pass = reducer._clock  # new in each pass

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        assert reducer is not None
        reducer._end()

    def __del__(self) -> None:
        # If the engine drops it late, another pass may run.
        if self._reducer is not None and self._reducer._clock is self._pass:
            self._reducer.withdraw()


@dataclass(frozen=True)
class ReducerOptions:
    """Settings of a reducer, the same on all ranks; the last size limit serves all others."""

    size_limits: tuple[int, ...]
    find_unused: bool = False
    static_graph: bool = False
    bucket_view: bool = False
    reduce_dtype: torch.dtype | None = None


@dataclass(eq=False)
class _Bucket:
    #: The place in the order of reduction, from 0.
    index: int
    #: The indices of the tensors in ``Reducer.leaves``, in the order in memory.
    members: tuple[int, ...]
    #: None for a sparse gradient, and on the meta device.
    memory: BucketMemory | None
    #: The reductions that run in the current pass, or the future of a communication hook.
    works: list[Any] = field(default_factory=list)
    #: A new object for each pass: the report of the last pass keeps the objects.
    times: BucketTimes = field(default_factory=BucketTimes)


class Reducer:
    """Averages the gradients of one replica with those of the other ranks."""

    def __init__(
        self,
        leaves: Sequence[GradLeaf],
        group: ProcessGroup,
        options: ReducerOptions,
        replica: Replica,
    ) -> None:
        self.leaves, self.group, self.options = list(leaves), group, options
        self.replica = replica
        self.hook: tuple[Any, CommHook] | None = None
        #: The group that reduces: the ranks that still have inputs.
        self.active = group
        #: False: a join context divides by the number of ranks that still have inputs.
        self.divide_by_initial_size = True
        #: True: the next backward pass accumulates gradients and does not reduce them.
        self.accumulating = False
        #: A forward pass was made whose backward pass is to reduce, and has not run.
        self.expecting = False
        self.passes = 0
        #: Makes the report of the last pass, whose buckets may have been assigned again since.
        self._last_report: Callable[[], StepReport] | None = None
        self.rebuilt = False
        self._order: list[int] = []
        #: For static graphs: how often each gradient is marked ready in a pass.
        self._expected_marks: list[int] | None = None
        self._unused_ahead: set[int] | None = None
        #: Gradients that passes without reduction have accumulated into.
        self._accumulated: set[int] = set()
        count = len(self.leaves)
        #: Changed in place only, since the hooks of parameters hold them.
        self._marks, self._bucket_of = [0] * count, [0] * count
        self._pending: list[int] = []
        #: The node that accumulated a gradient in the last pass, and likely does in the next.
        self._likely_node: Any = None
        #: Without a free CPU the core's thread takes turns with backward: reducing at once is
        #: quicker then, unless other programs get the CPUs whenever backward waits. Not where
        #: ranks' graphs may differ: a rank would wait for a bucket that another starts at the end.
        self._overlaps = options.find_unused or has_spare_core(group.size())
        self._at_once = self._is_crowded = False
        self._tensors = [leaf.tensor for leaf in self.leaves]
        self._removers = [leaf.on_grad(self._marker(at)) for at, leaf in enumerate(self.leaves)]
        self._remove_hooks = finalize(self, _remove_all, self._removers)
        self._hooks: list[Any] = list(map(_hooks_of, self._tensors))
        self._identities = list(map(_identity, self._tensors))
        # The first pass is expected to give gradients in reverse order of use.
        self._assign(self._plan(range(count - 1, -1, -1)))
        self._reset()

    def go_on_from(self, before: Reducer) -> None:
        """Take over the hook, divisor, report and waiting gradients of ``before``. Local."""
        self._last_report = before._last_report
        self.hook, self.divide_by_initial_size = before.hook, before.divide_by_initial_size
        waiting = {id(before.leaves[index].tensor) for index in before._accumulated}
        self._accumulated = {
            index for index, leaf in enumerate(self.leaves) if id(leaf.tensor) in waiting
        }

    def reduce_frozen(self) -> None:
        """Average accumulated gradients of parameters that were frozen since. Collective."""
        frozen = [i for i, leaf in enumerate(self.leaves) if not leaf.tensor.requires_grad]
        accumulated = {i for i in self._accumulated if self._tensors[i].grad is not None}
        waits = torch.tensor([float(index in accumulated) for index in frozen])
        if frozen:
            all_reduce(waits, ReduceOp.MAX, self.group)
        for index, is_waiting in zip(frozen, waits.tolist(), strict=True):
            tensor = self.leaves[index].tensor
            if is_waiting:
                dtype = grad_dtype_of(tensor)
                grad = torch.zeros_like(tensor, dtype=dtype) if tensor.grad is None else tensor.grad
                all_reduce(grad, ReduceOp.AVG, self.group)
                tensor.grad = grad

    def close(self) -> None:
        """Remove the hooks. Idempotent; not collective."""
        self._remove_hooks()
        self._likely_node = None

    def is_current(self) -> bool:
        """False if a leaf was replaced, as ``swap_tensors`` does, or has another ``grad_dtype``."""
        return list(map(_identity, self._tensors)) == self._identities

    # -- buckets -----------------------------------------------------------------------------

    def _plan(self, order: Sequence[int]) -> BucketPlan:
        if not self.leaves:
            return BucketPlan((), ())
        tensors = [self._tensors[index] for index in order]
        sparse = [self.leaves[index].sparse for index in order]
        return plan_buckets(tensors, self.options.size_limits, sparse=sparse, indices=order)

    def _assign(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.buckets = [
            _Bucket(i, members, self._memory(members)) for i, members in enumerate(plan.buckets)
        ]
        #: The names of each bucket's parameters, the bytes and the dtype, for reports.
        self._described = [
            (
                tuple(self.leaves[member].name for member in bucket.members),
                0 if bucket.memory is None else bucket.memory.nbytes,
                "sparse" if bucket.memory is None else str(bucket.memory.dtype)[6:],
            )
            for bucket in self.buckets
        ]
        for bucket in self.buckets:
            for member in bucket.members:
                self._bucket_of[member] = bucket.index

    def _memory(self, members: tuple[int, ...]) -> BucketMemory | None:
        leaves = [self.leaves[member] for member in members]
        if leaves[0].sparse or lacks_memory(leaves[0].tensor):
            return None
        dtype = self.options.reduce_dtype or grad_dtype_of(leaves[0].tensor)
        tensors = [leaf.tensor for leaf in leaves]
        return BucketMemory(tensors, dtype, self.group, self.options.bucket_view)

    @unrecorded
    def rebuild(self) -> None:
        """Assign the buckets once in the order in which gradients came. Collective."""
        if self.rebuilt or not self.passes or self._open:
            return
        self.rebuilt = True
        every = range(len(self.leaves))
        order = every[::-1] if self._accumulated else dict.fromkeys([*self._order, *every])
        shared = torch.tensor(list(order), dtype=torch.int64)
        broadcast(shared, group=self.group, group_src=0)
        plan = self._plan(shared.tolist())
        if plan != self.plan:
            self._assign(plan)
        self._reset()

    # -- one backward pass -------------------------------------------------------------------

    def _reset(self) -> None:
        self._open = self._is_simple = False
        self._marks[:] = [0] * len(self.leaves)
        self._pending[:] = [len(bucket.members) for bucket in self.buckets]
        self._missing: list[int] = []
        self._next = 0
        for bucket in self.buckets:
            bucket.works = []
            bucket.times = BucketTimes()

    def expect(self, unused: set[int] | None) -> None:
        """Note a forward pass whose backward is to reduce, without ``unused``. Local."""
        self.expecting = True
        known = self._unused_ahead
        self._unused_ahead = unused if known is None or unused is None else known & unused

    def abandon(self) -> None:
        """Forget a backward pass that raised before the end. Local."""
        if self._open and torch._C._current_graph_task_id() == -1:
            self.withdraw()
            self._reset()

    def withdraw(self) -> None:
        """Let parameters have copies of gradients to which reductions may still write. Local."""
        for bucket in self.buckets[: self._next]:
            if bucket.memory is not None:
                bucket.memory.withdraw()

    def begin(self) -> None:
        """Prepare for the reductions of the backward pass that runs, unless done. Local."""
        if self._open or not self._will_accumulate():
            return
        self.accumulating = False
        if sum(map(len, self._hooks)) > len(self._hooks):  # the program has added hooks
            for leaf, remover in zip(self.leaves, self._removers, strict=True):
                leaf.place_last(remover)
        self._reset()
        self._open = True
        kept = not self._accumulated and self._tensors[0].grad is not None
        self.replica.passes.begin_backward(self._tensors, kept)
        self._is_simple = self.rebuilt and not self.options.static_graph
        if not self.rebuilt:
            self._order = []
        self._start_clock()
        _engine.queue_callback(_PassEnd(self))
        self._open_memories()
        unused, self._unused_ahead = self._unused_ahead, None
        if self.options.find_unused and not self.options.static_graph:
            for index in sorted(unused or ()):
                self._missing.append(index)
                self._mark(index)
        elif self._expected_marks is not None:
            for index, count in enumerate(self._expected_marks):
                if count == 0:
                    self._missing.append(index)
                    self._count_down(index)

    def _start_clock(self) -> None:
        self._clock, self._cpu_time = PassTimes(started=time.perf_counter()), time.thread_time()
        # Ranks record the same program, whatever else their cores do.
        looks = not self.passes % _LOOK_EVERY or current_recorder() is not None
        self._at_once = not self._overlaps and (looks or not self._is_crowded)

    def _open_memories(self) -> None:
        for bucket in self.buckets:
            if bucket.memory is not None:
                bucket.memory.open(whole=self.hook is not None)

    def _will_accumulate(self) -> bool:
        """True if the backward pass that runs adds to the gradient of at least one parameter."""
        if not self._tensors:
            return False
        if self._likely_node is not None and _will_run(self._likely_node):
            return True
        # A cast gives a tensor another node, and this graph may lack the last pass's node.
        for leaf in self._tensors:
            if leaf.requires_grad and _will_run(node := get_gradient_edge(leaf).node):
                self._likely_node = node
                return True
        # A graph from before a cast has the nodes from before the cast, and a reentrant checkpoint
        # makes the checkpointed part of the graph only later.
        current: Any = torch._C
        own = set(map(id, self._tensors))
        reached = accumulators([current._current_autograd_node()])
        nodes = [node for node in reached if id(node.variable) in own]
        return not nodes or any(map(_will_run, nodes))

    def _marker(self, index: int) -> Callable[[Tensor], None]:
        """The hook that marks gradient ``index`` as ready when backward has accumulated it."""
        marks, pending, bucket_of = self._marks, self._pending, self._bucket_of
        of = ref(self)  # Python finds no cycle of references that goes through these hooks

        def mark(_: Tensor) -> None:
            reducer = of()
            if reducer is None:
                return
            if not reducer._is_simple or marks[index]:
                reducer._mark_with_care(index)
                return
            marks[index] = 1
            bucket = bucket_of[index]
            pending[bucket] -= 1
            if not pending[bucket]:
                reducer._on_ready(bucket)

        return mark

    def _mark_with_care(self, index: int) -> None:
        """Mark a gradient as ready in the cases that are too rare for the hook's short code."""
        if self.accumulating:
            self._accumulated.add(index)
            return
        if not self._open:
            if not self.expecting:  # backward of the module without the wrapper
                return
            self.begin()
            if not self._open:
                return
        self._mark(index)

    def _mark(self, index: int) -> None:
        """Mark a gradient as ready, and start the buckets that are now complete."""
        self._marks[index] += 1
        if not self.options.static_graph:
            if self._marks[index] > 1:
                self._open = self._is_simple = False
                raise RuntimeError(_twice(self.leaves[index]))
            if not self.rebuilt and index not in self._missing:
                self._order.append(index)
            self._count_down(index)
        elif self._expected_marks is None:  # the first pass counts how often each gradient comes
            if self._marks[index] == 1:
                self._order.append(index)
        elif self._marks[index] == self._expected_marks[index]:
            self._count_down(index)
        elif self._marks[index] > self._expected_marks[index]:
            self._open = False
            raise RuntimeError(
                f"static_graph=True, but the gradient of {self.leaves[index]} came more often than "
                f"in the first backward pass ({self._expected_marks[index]} times): the graph "
                f"changes between steps, so construct DistributedDataParallel without static_graph"
            )

    def _count_down(self, index: int) -> None:
        bucket = self._bucket_of[index]
        self._pending[bucket] -= 1
        if not self._pending[bucket]:
            self._on_ready(bucket)

    def _on_ready(self, index: int) -> None:
        """Note that bucket ``index`` has all gradients; start each bucket whose turn it is."""
        self.buckets[index].times.ready = time.perf_counter()
        while self._next < len(self.buckets) and not self._pending[self._next]:
            self._start(self.buckets[self._next])
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        """Complete a bucket's memory, with zeros for missing gradients, and start the reduction."""
        bucket.times.started = time.perf_counter()
        memory = bucket.memory
        if memory is None:
            return  # sparse gradients are reduced at the end
        missing = set(self._missing)
        absent = memory.fill(
            [place for place, member in enumerate(bucket.members) if member in missing]
            if missing
            else ()
        )
        self._missing += [bucket.members[place] for place in absent]
        with self.replica.passes.carried():
            self._start_reduction(bucket, memory)

    def _start_reduction(self, bucket: _Bucket, memory: BucketMemory) -> None:
        is_last = bucket.index == len(self.buckets) - 1
        at_once = is_last or self._at_once
        if self.hook is None:
            works = [self._average(part, async_op=not at_once) for part in memory.parts]
            if not at_once:
                bucket.works = works
            else:
                bucket.times.reduced = time.perf_counter()
                self._clock.blocked += bucket.times.reduced - bucket.times.started
            return
        state, hook = self.hook
        grads = GradBucket(bucket.index, memory.flat, memory.views, memory.tensors, is_last)
        future = hook(state, grads)
        if not isinstance(future, _AnyFuture):
            raise TypeError(
                f"a communication hook returns a torch.futures.Future of the reduced buffer, got "
                f"{type(future).__name__} from {getattr(hook, '__qualname__', hook)}"
            )
        bucket.works = [future]

    def _average(self, flat: Tensor, async_op: bool) -> Work | None:
        divisor = self._divisor()
        if divisor == self.active.size():
            return all_reduce(flat, ReduceOp.AVG, self.active, async_op)
        flat.div_(divisor)
        return all_reduce(flat, ReduceOp.SUM, self.active, async_op)

    def _divisor(self) -> int:
        return self.group.size() if self.divide_by_initial_size else self.active.size()

    # -- the end of a pass -------------------------------------------------------------------

    def _end(self) -> None:
        """Finish the pass: start the remaining buckets, wait, compare, hand out averages."""
        try:
            with torch.no_grad(), self.replica.passes.carried():
                self._finish()
        except BaseException:
            self.withdraw()
            raise
        finally:
            self._open = self._is_simple = self.expecting = False

    def _finish(self) -> None:
        if self.options.static_graph and self._expected_marks is None:
            self._expected_marks = list(self._marks)
        if not all(self._marks):
            self._missing += [index for index, count in enumerate(self._marks) if not count]
        accumulated = {i for i in self._accumulated if self._tensors[i].grad is not None}
        self._missing = sorted(set(self._missing) - accumulated)
        self._accumulated.clear()
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        self._next = len(self.buckets)
        self._missing = sorted(set(self._missing))
        self._clock.computed = now = time.perf_counter()
        if self._at_once:
            share = _LEAST_SHARE * (now - self._clock.started - self._clock.blocked)
            self._is_crowded = time.thread_time() - self._cpu_time < share
        used = self._compare()
        for bucket in self.buckets:
            self._wait(bucket)
        self._clock.ended = time.perf_counter()
        self._hand_out(used)
        self._clock.buckets = [bucket.times for bucket in self.buckets]
        self._last_report = partial(step_report, self._clock, self._described, self.rebuilt)
        self.passes += 1

    def _hand_out(self, used: list[bool] | None) -> None:
        """Give parameters the averages of the gradients that any rank has; None: of all."""
        for bucket in self.buckets:
            first = bucket.members[0]
            if bucket.memory is not None:
                bucket.memory.hand_out(used and [used[member] for member in bucket.members])
            elif self.leaves[first].sparse and (used is None or used[first]):
                self._reduce_sparse(bucket)

    def _compare(self) -> list[bool] | None:
        """Compare ranks; return which gradients some rank has (None: all). Collective."""
        may_lack = self.options.find_unused or self.options.static_graph
        facts = [len(self._missing)]
        if may_lack:
            facts = [1] * len(self.leaves)
            for index in self._missing:
                facts[index] = 0
        compares_values = self.hook is None  # a hook may let replicas part for some time
        digest = self.replica.digest(compares_values)
        row = torch.tensor([*facts, digest, -digest])
        all_reduce(row, ReduceOp.MAX, self.active)
        *facts, highest, lowest = row.tolist()
        if highest != -lowest:
            self.replica.find_difference(self.active)
        if may_lack:
            return list(map(bool, facts))
        return self._used_but_frozen() if facts[0] else None

    def _used_but_frozen(self) -> list[bool]:
        """For each gradient False if the parameter was frozen since forward. Collective."""
        leaves = self.leaves
        lacks = agree(
            lambda: [(i, str(leaves[i]), leaves[i].tensor.requires_grad) for i in self._missing],
            self.active,
        )
        if all(each == lacks[0] for each in lacks) and not any(trained for *_, trained in lacks[0]):
            frozen = {index for index, *_ in lacks[0]}
            return [index not in frozen for index in range(len(leaves))]
        taken = agree(
            lambda: [str(leaves[i]) for i in self._missing if self._marks[i]], self.active
        )
        names = taken if any(taken) else [[name for _, name, _ in each] for each in lacks]
        say = _taken if any(taken) else _missing
        self._open = False
        raise RuntimeError(say(dict(zip(self.active.global_ranks, names, strict=True))))

    def _wait(self, bucket: _Bucket) -> None:
        if not bucket.works and bucket.memory is not None:
            return  # reduced at once
        value: Any = None
        for work in bucket.works:
            value = work.wait()
        if self.hook is not None:
            result = value[0] if isinstance(value, list | tuple) else value
            assert bucket.memory is not None
            flat = bucket.memory.flat
            if not isinstance(result, Tensor) or result.numel() != flat.numel():
                raise TypeError(
                    f"a communication hook's future holds the reduced buffer of {flat.numel()} "
                    f"elements, got {_described(result)}"
                )
            if address_of(result) != address_of(flat):
                flat.copy_(result.reshape(flat.shape))
        bucket.times.reduced = time.perf_counter()

    def _reduce_sparse(self, bucket: _Bucket) -> None:
        (member,) = bucket.members
        tensor = self.leaves[member].tensor
        grad = tensor.grad
        if grad is None:
            grad = torch.zeros_like(tensor).to_sparse(1)  # rows, as gradients of embeddings are
        if grad.layout is torch.strided:
            all_reduce(grad, group=self.active)
        else:
            all_reduce_sparse(grad, ReduceOp.SUM, self.active)
        tensor.grad = grad.div_(self._divisor())

    def report(self) -> StepReport:
        """The report of the last backward pass on this rank; raises if there was none."""
        if self._last_report is None:
            raise RuntimeError(
                "report() describes the last backward pass, and none has run: call backward() first"
            )
        return self._last_report()


#: The number of the C++ tensor behind a Python object: gradient hooks belong to that tensor.
_identity = attrgetter("_cdata", *["grad_dtype"] * hasattr(Tensor, "grad_dtype"))
_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def _remove_all(removers: list[Any]) -> None:
    while removers:
        removers.pop().remove()


def _will_run(node: Any) -> bool:
    """True if the backward pass runs a node, unless torch.autograd.grad() takes the gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:  # torch does not answer for such nodes
        if "autograd.grad()" not in str(error):
            raise
        return False


def _described(value: Any) -> str:
    return f"{value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__


def _twice(leaf: GradLeaf) -> str:
    return (
        f"Expected to mark a variable ready only once. The gradient of parameter {leaf} came twice "
        f"in one backward pass. Causes: a module that is checkpointed with use_reentrant=True runs "
        f"more than once, or parameters that are used in a reentrant checkpoint were counted as "
        f"unused by find_unused_parameters=True. Use checkpoint(..., use_reentrant=False), or "
        f"static_graph=True if every step has the same graph."
    )


def _by_rank(names: dict[int, list[str]]) -> str:
    return "\n".join(f"  rank {rank}: {', '.join(those)}" for rank, those in names.items() if those)


def _taken(names: dict[int, list[str]]) -> str:
    return (
        f"the gradients of these parameters were there, and were cleared during backward, before "
        f"they could be averaged:\n{_by_rank(names)}\n{HOOKS_COME_FIRST}"
    )


def _missing(names: dict[int, list[str]]) -> str:
    everywhere = len({tuple(those) for those in names.values()}) == 1
    where = "any rank" if everywhere else "some ranks"
    lacking = sorted({name for those in names.values() for name in those})
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return (
        f"the loss does not depend on {lacking[0].partition(' ')[0]}{more}: no gradient on "
        f"{where}, and the others' averages are not to be used.\n"
        f"No gradient:\n{_by_rank(names)}\n"
        f"Use every output of the module in the loss, or construct it with "
        f"find_unused_parameters=True; a parameter that is never used can be frozen with "
        f"requires_grad_(False)."
    )


class DelayedReduction:
    """Averages some gradients in one message when the trigger's gradient is ready."""

    def __init__(self, leaves: Sequence[GradLeaf], trigger: nn.Parameter, reducer: Reducer) -> None:
        self._leaves, self._reducer = list(leaves), reducer
        # A weak reference: Python finds no cycle of references that goes through these hooks.
        reduce: Any = WeakMethod(self._reduce)
        on_grad: Any = trigger.register_post_accumulate_grad_hook
        self._remove = finalize(self, on_grad(lambda _: reduce()()).remove)

    def close(self) -> None:
        """Remove the hook. Idempotent; not collective."""
        self._remove()

    @torch.no_grad()
    def _reduce(self) -> None:
        if self._reducer.accumulating:
            return
        grads = [leaf.tensor.grad for leaf in self._leaves]
        dense = [
            torch.zeros_like(leaf.tensor) if grad is None else grad
            for leaf, grad in zip(self._leaves, grads, strict=True)
        ]
        flat = torch.cat([grad.reshape(-1) for grad in dense])
        with self._reducer.replica.passes.carried():
            all_reduce(flat, ReduceOp.AVG, self._reducer.active)
        for leaf, grad, part in zip(
            self._leaves, dense, torch.split(flat, [g.numel() for g in dense]), strict=True
        ):
            grad.copy_(part.view(grad.shape))
            leaf.tensor.grad = grad
