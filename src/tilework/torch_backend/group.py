"""tilework's process group as torch.distributed's interface requires.

torch calls these methods from Python (``torch.distributed.all_reduce``) and from C++ (DDP's
reducer, the functional collectives). Both arrive at the same methods here, which hand the tensors
to :mod:`tilework.comm.operations.collectives`: there they are checked, and moved as any other call
would be.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tilework.comm.backends.internal import BackendConfig
from tilework.comm.contract import (
    FORMS,
    AnyReduceOp,
    Form,
    Options,
    ProcessGroup,
    ReduceOp,
    SeveralWorks,
    Work,
    coalesced,
    make_premul_sum,
)
from tilework.comm.groups import GroupPlan, notice_waits
from tilework.comm.operations import internal as operations
from tilework.comm.operations.internal import all_reduce_sparse, leave_function
from tilework.comm.per_call.internal import call_site
from tilework.comm.provenance_digest import carrying
from tilework.comm.world import GroupRecord, World, current_world
from tilework.errors import CollectiveTimeoutError
from tilework.store import PrefixStore, store_based_barrier
from tilework.store.torch_bridge import TorchStoreAdapter
from tilework.torch_backend.devices import OtherDevices
from tilework.torch_backend.work import DoneWork, TorchWork

_c10d: Any = torch._C._distributed_c10d
_OPS: dict[Any, AnyReduceOp] = {
    getattr(_c10d.ReduceOp, op.name): op
    for op in ReduceOp.RedOpType  # type: ignore[attr-defined]
    if op is not ReduceOp.PREMUL_SUM
}


def is_async(opts: Any) -> bool:
    """True if the call is to return before the operation is done; torch's default, also in C++."""
    return opts is None or getattr(opts, "asyncOp", True)


def reduction(opts: Any) -> AnyReduceOp:
    """The reduction that ``opts`` ask for; the sum if ``opts`` are None."""
    if opts is None:
        return ReduceOp.SUM
    asked = opts.reduceOp
    found = _OPS.get(asked.op)
    return _premul_sum(asked) if found is None else found


def _premul_sum(asked: Any) -> AnyReduceOp:
    factor = getattr(asked, "factor", None)
    if factor is None:
        raise NotImplementedError(
            f"this torch ({torch.__version__}) does not pass the factor of a PREMUL_SUM to "
            f"backends written in Python: scale the tensor and use SUM"
        )
    return make_premul_sum(factor)


def root(opts: Any) -> int:
    """The group rank of the root in ``opts``; 0 if ``opts`` are None."""
    return 0 if opts is None else int(opts.rootRank)


def time_limit(opts: Any) -> timedelta | None:
    """The call's own timeout; None where it has none (torch writes -1 ms)."""
    limit: timedelta | None = None if opts is None else opts.timeout
    return limit if limit is not None and limit > timedelta(0) else None


def name_writer(tensor: Tensor, operation: str) -> None:
    """Let backward's error name ``operation`` if it needs values that the write replaced."""
    made: Any = tensor.grad_fn
    site = call_site()

    def check(gradients: object) -> None:
        node: Any = torch._C._current_autograd_node()  # held by a hook, it would hold itself
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                _check(node, name, operation, site)

    made.register_prehook(check)


def _check(node: Any, name: str, operation: str, site: str) -> None:
    try:
        getattr(node, name)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            return  # the graph was freed: the node raises
        raise RuntimeError(
            f"{operation} at {site} overwrote the result of {node.name()}, which backward needs: "
            f"let {operation} write to a clone(), or use a functional collective, which autograd "
            f"differentiates"
        ) from error


BACKEND_NAME = "tilework"

_CPU = torch.device("cpu")
#: ``group.allreduce(tensor, op=…)``: torch's groups take these as well.
_INSTEAD_OF_OPTS = {"op", "root", "timeout"}
#: What operations were called before torch 2.13, and are called in programs that still are so.
_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
#: What torch calls the methods whose names are others in tilework's groups.
_NAMES = {
    "allgather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "alltoall_single": "all_to_all_single",
}
#: Stands for a provenance digest in the headers of means of integers.
_MEAN = 0x6D65616E
#: The integers that torch divides.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_LOSES_WORKS = TorchVersion(torch.__version__) < "2.7"
#: So many that are done stay at most, until C++ has asked for their future or waited.
_KEPT_WORKS = 64
_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def _by_device(operation: _Operation) -> _Operation:
    """Decorate an operation: it runs on tensors of the group's own device; others go elsewhere."""
    name = operation.__name__
    lists = name in ("allreduce", "broadcast")

    def call(self: TorchProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if (kwargs and kwargs.keys() & _INSTEAD_OF_OPTS) or (lists and isinstance(args[0], Tensor)):
            # torch turns these into a list and opts, and calls here again.
            return getattr(_c10d.ProcessGroup, name)(self, *args, **kwargs)
        tensor = _first_tensor(args)
        if tensor is None or tensor.device.type == self._device:
            return self._kept(operation(self, *args, **kwargs))
        elsewhere = self._devices.group_for(self, tensor.device)
        known = name if hasattr(elsewhere, name) else _FORMER_NAMES[name]
        return getattr(elsewhere, known)(*args, **kwargs)

    # It would look inside, where it takes a group for a thing without parts.
    leave_function(cast(FunctionType, call))
    call.__name__, call.__doc__ = name, operation.__doc__
    return cast(_Operation, call)


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, (list, tuple)):  # first, as isinstance of a Tensor takes longer
            found = _first_tensor(value)
            if found is not None:
                return found
        elif isinstance(value, Tensor):
            return value
    return None


class TorchProcessGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """A process group on this rank: torch.distributed makes it, and tilework runs it.

    Ranks are group ranks, as in torch's own process groups. Operations return a torch ``Work``; the
    ``Work`` of an operation that is not asynchronous is done already. A Python caller gets
    tilework's own errors (:mod:`tilework.errors`). Where torch's C++ code waits for a future, as
    DDP's reducer does, the error becomes a RuntimeError with the name and the text of the error.

    Args:
        request: torch's description of the group.
        options: The caller's ``pg_options``, for tilework's backend or for the engine of other
            devices.
        device: The type of the devices whose tensors this object moves.
    """

    # Asked of a backend by torch; this group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, request: Any, options: Any = None, device: str = "cpu") -> None:
        super().__init__(request.group_rank, request.group_size)
        self._device = device
        self._name, self._desc = str(request.group_id), ""
        self._torch_store = request.store
        # A separate World: torch.distributed's groups are not tilework's.
        self._world = World(sink=current_world().sink)
        # Leaves the group when nobody holds this object any more, at the latest when Python ends.
        self._group = _make_group(self._world, request, options, device)
        notice_waits()
        unhost = current_world().host(self.tilework_record)
        self._leave = weakref.finalize(self, _leave, unhost, self._world)
        compared = partial(TorchProcessGroup, request, options)
        self._devices = OtherDevices(self, request.store, request.timeout, options, compared)
        self._block: list[TorchWork] | None = None
        self._handed_out: deque[TorchWork] = deque()

    def _kept(self, result: Any) -> Any:
        """Keep ``result`` alive: up to torch 2.6, C++ loses the Python part of a Work."""
        if _LOSES_WORKS and isinstance(result, _c10d.Work):
            works = self._handed_out
            works.append(result)
            while len(works) > _KEPT_WORKS and works[0].is_completed():
                works.popleft()
        return result

    @property
    def tilework_record(self) -> GroupRecord:
        """The record of tilework's group behind this group, for tilework's own functions."""
        return self._world.record(self._group)

    def _run(
        self,
        outputs: Sequence[Tensor],
        name: str,
        start: Callable[[], Work | None],
        finish: Callable[[], None] | None = None,
    ) -> TorchWork:
        """Start operation ``name``; ``finish`` runs before any wait for it returns."""
        for output in outputs:
            if output.grad_fn is not None:
                name_writer(output, name)
        work = start()
        if work is None and finish is not None:
            finish()
        ours = DoneWork(outputs) if work is None else TorchWork(work, self._group, finish)
        if self._block is not None:
            self._block.append(ours)
        return ours

    def _collective(self, form: Form, args: Sequence[Any], opts: Any) -> TorchWork:
        """Run a collective for torch; a mean of integers drops the fraction."""
        (operation,) = form.operations(args)
        if form.root:
            operation.root = self._group.group_ranks[self._global(root(opts))]
        is_here = form.outputs.is_here(operation.root == self._group.rank())
        written = operation.outputs if is_here else ()
        outputs = [written] if isinstance(written, Tensor) else written
        run = partial(operations.run, operation, self._group, is_async(opts))
        if not form.reduces:
            return self._run(outputs, form.name, run)
        operation.reduce_op = reduction(opts)
        first = _first_tensor(args)
        assert first is not None
        if first.layout is not torch.strided and form.name == "all_reduce":
            all_reduce_sparse(first, operation.reduce_op, self._group)
            return DoneWork(outputs)
        if operation.reduce_op is not ReduceOp.AVG or first.dtype not in _INTEGERS:
            return self._run(outputs, form.name, run)

        def divide() -> None:
            for output in outputs:
                output.detach().div_(self._group.size(), rounding_mode="trunc")

        # Otherwise a rank's mean would meet another rank's sum.
        with carrying(_MEAN, ReduceOp.AVG):
            operation.reduce_op = ReduceOp.SUM
            return self._run(outputs, form.name, run, divide)

    def as_one(self, works: Sequence[Any]) -> TorchWork:
        """A Work that is done when all of ``works`` are done."""
        return works[0] if len(works) == 1 else TorchWork(SeveralWorks(works), self._group)

    def _global(self, rank: int) -> int:
        """The global rank of group rank ``rank``, since tilework's operations take global ranks."""
        ranks = self._group.global_ranks
        if not 0 <= rank < len(ranks):
            raise ValueError(
                f"Group rank {rank} is not part of group {self._name!r}, which has {len(ranks)} "
                f"ranks: give a number from 0 to {len(ranks) - 1}"
            )
        return ranks[rank]

    # -- operations ----------------------------------------------------------------------

    allreduce_coalesced = _by_device(coalesced("allreduce", is_nested=True))
    allgather_coalesced = _by_device(coalesced("allgather", is_nested=True))
    all_gather_single_coalesced = _by_device(coalesced("all_gather_single"))
    reduce_scatter_single_coalesced = _by_device(coalesced("reduce_scatter_single"))

    # torch's own programs send [] into [1]: messages have a dtype and a number of elements.

    @_by_device
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> TorchWork:
        source = tensors[0].reshape(-1)
        start = partial(operations.isend, source, self._global(dst), self._group, tag)
        return self._run([], "isend", start)

    @_by_device
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> TorchWork:
        return self._receive(tensors, src=self._global(src), tag=tag)

    @_by_device
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> TorchWork:
        return self._receive(tensors, tag=tag)

    def _receive(self, tensors: list[Tensor], **source: Any) -> TorchWork:
        tensor, finish = tensors[0].detach(), None
        if tensor.is_contiguous():
            memory = tensor.view(-1)
        else:
            memory = tensor.new_empty(tensor.numel())
            finish = partial(_fill, tensor, memory)
        start = partial(operations.irecv, memory, group=self._group, **source)
        return self._run(tensors, "irecv", start, finish)

    @_by_device
    def barrier(self, opts: Any = None) -> TorchWork:
        options = Options(timeout=time_limit(opts), asyncOp=is_async(opts))
        return TorchWork(self._group.barrier(options), self._group)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        try:
            self._group.monitored_barrier(timeout)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{self._monitored(error, wait_all_ranks)}: {error}", ranks=error.ranks
            ) from None

    def _monitored(self, error: CollectiveTimeoutError, all_ranks: bool) -> str:
        """The error text of torch's own groups for ranks that did not pass a monitored barrier."""
        me = self._group.rank()
        if me != 0:
            return (
                f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0"
            )
        late = sorted(self._group.global_ranks.index(rank) for rank in error.ranks)
        if all_ranks and len(late) > 1:
            whom = f"Ranks {', '.join(map(str, late))}"
        else:
            whom = f"Rank {late[0]}" if late else "Some rank"
        return f"Rank 0 timed out in monitoredBarrier: {whom} failed to pass monitoredBarrier"

    def _start_coalescing(self, device: torch.device) -> None:
        self._block = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        works, self._block = self._block or [], None
        return self.as_one(works)

    # -- what torch asks of a group, and of the backend that this is as well ---------------

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def setGroupName(self, name: str) -> None:
        self._name = self._group.group_name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = self._group.group_desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    # In older torch, Python and C++ call different methods.
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        """The store that torch gave this group."""
        return self._torch_store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *map(torch.device, self._devices.names(self))]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == self._device:
            return self
        try:
            return self._devices.group_for(self, torch.device(device))._get_backend(device)
        except ValueError as error:
            # torch looks for devices that a group may lack, and continues after this class alone.
            raise RuntimeError(str(error)) from None

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """True if :meth:`allocate_tensor` can allocate on ``device``: on the CPU only."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype | None = None, device: torch.device = _CPU
    ) -> Tensor:
        """A tensor of ``size`` elements in memory that operations do not copy, if possible."""
        return self._group.empty(size, dtype=dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers start at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.get_sequence_number_for_group()

    def abort(self) -> None:
        """Make every present and future operation raise, on all ranks."""
        self._group.abort("torch.distributed aborted the group")
        self._devices.abort()

    def shutdown(self) -> None:
        """Leave the group. Does not wait for other ranks."""
        self._leave()
        self._devices.shutdown()


def _leave(unhost: Callable[[], None], world: World) -> None:
    unhost()
    world.close()


def _fill(tensor: Tensor, memory: Tensor) -> None:
    tensor.copy_(memory.view(tensor.shape))


def _add_collective(form: Form) -> None:
    count = len(form.sides) + 2 * form.has_rows

    def call(self: TorchProcessGroup, *args: Any, opts: Any = None) -> TorchWork:
        return self._collective(form, args[:count], args[count] if args[count:] else opts)

    call.__name__ = _NAMES.get(form.method, form.method)
    setattr(TorchProcessGroup, call.__name__, _by_device(call))


for _form in FORMS.values():
    if _form.sides:  # torch's barrier has no tensors, by which to find the device
        _add_collective(_form)
for _new, _former in _FORMER_NAMES.items():
    setattr(TorchProcessGroup, _former, getattr(TorchProcessGroup, _new))


def _make_group(world: World, request: Any, options: Any, device: str) -> ProcessGroup:
    """Make tilework's group for ``request`` and ``device``. Collective over the group's ranks."""
    rank, size, timeout = request.group_rank, request.group_size, request.timeout
    ranks = tuple(request.global_ranks_in_group) or tuple(range(size))
    store = TorchStoreAdapter(request.store, timeout)
    # A store may outlive a group, and torch numbers groups from 0 after the last was destroyed.
    generation = store.add(f"tilework/generations/{device}/{rank}", 1)
    shared = PrefixStore(f"tilework/{device}/{generation}", store)
    # Names ranks that do not come; torch's engines, and their stores, do not.
    store_based_barrier(ranks[rank], shared, "makers", len(ranks), timeout, ranks=ranks)
    choice = os.environ.get("TILEWORK_BACKEND")
    backend = BackendConfig(choice).get_device_backend_map().get(device, "nccl")
    name = str(request.group_id) + ("" if device == "cpu" else f" on {device}")
    plan = GroupPlan(world, shared, ranks, rank, name, timeout)
    return plan.make(BackendConfig(f"{device}:{backend}"), options, fall_back=choice is None)
