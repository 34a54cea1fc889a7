"""The contract of process groups and asynchronous work, for every backend.

A backend subclasses :class:`ProcessGroup` and overrides the operations that it has. Method
names and argument shapes are those of torch.distributed's own backend layer, so a backend
written in Python for that library fits here unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from tilework.comm.capabilities import Capability as Capability
from tilework.comm.elastic.registers import Registers
from tilework.comm.flight.ring import Entry, Tail
from tilework.comm.forms import FORMS as FORMS
from tilework.comm.forms import Form as Form
from tilework.comm.forms import Kind as Kind
from tilework.comm.forms import Operation as Operation
from tilework.comm.forms import Parts
from tilework.comm.reduce_op import AnyReduceOp as AnyReduceOp
from tilework.comm.reduce_op import RedOpType as RedOpType
from tilework.comm.reduce_op import ReduceOp as ReduceOp
from tilework.comm.reduce_op import check_reduction as check_reduction
from tilework.comm.reduce_op import make_premul_sum as make_premul_sum
from tilework.comm.reduce_op import supports_complex as supports_complex
from tilework.errors import DistBackendError
from tilework.layout.internal import refuse_torch_caller


@dataclass(frozen=True, slots=True)
class MessageWait:
    """A thread's wait until a message of a group is sent or received."""

    #: The group rank at the other end; -1: any.
    peer: int
    #: The operation in words, for messages.
    what: str
    #: The caller's ``file:line in function``.
    site: str
    #: The time when the wait began, on some clock; distinguishes this wait from other waits.
    begun: float


class Work(ABC):
    """An operation in flight. Returned by every operation with ``async_op=True``.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.ones(2)
        ...     work = dist.all_reduce(x, async_op=True)
        ...     work.wait()  # until then x is the operation's
        ...     return x.tolist()
        >>> run_ranks(2, program)[0]
        [2.0, 2.0]
    """

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until this rank's part is done; return True.

        Args:
            timeout: Give up waiting after this long; the operation itself continues. None waits
                as long as the operation's own timeout lets it live.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed first.
            DistBackendError: The operation failed (the error's subclass says how).
        """

    def synchronize(self) -> None:
        """Block until the operation is done, as :meth:`wait` does."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """True if the operation has ended, successfully or not. Never blocks."""
        return True

    def is_success(self) -> bool:
        """True if the operation has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that the operation failed with; None while it runs, and after a success."""
        return None

    def result(self) -> list[Tensor]:
        """The output tensors of a completed operation."""
        return []

    def source_rank(self) -> int:
        """The global rank that a received message came from."""
        raise RuntimeError(
            "only a receive has a source rank: call source_rank() on the Work of irecv()"
        )

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that completes with :meth:`result`, or fails with :meth:`exception`."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self.result())
        return future


class CompletedWork(Work):
    """The Work of an operation that was done before the call returned."""

    def __init__(self, outputs: Sequence[Tensor] = (), source: int | None = None) -> None:
        self._outputs = outputs
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return list(self._outputs)

    def source_rank(self) -> int:
        return super().source_rank() if self._source is None else self._source


class SeveralWorks(Work):
    """A Work that stands for several Works in order: it is done when all of them are done."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def exception(self) -> BaseException | None:
        return next((e for e in (work.exception() for work in self.works) if e), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self.works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        futures = [work.get_future() for work in self.works]
        joined: torch.futures.Future[list[Tensor]] = torch.futures.collect_all(futures).then(
            lambda done: [tensor for future in done.value() for tensor in future.value()]
        )
        return joined


@dataclass(slots=True)
class Options:
    """The options of one call of an operation. An operation ignores fields that it does not need.

    The names are those that backends for torch.distributed expect on their ``opts``.
    """

    #: The reduction of contributions.
    reduceOp: AnyReduceOp = ReduceOp.SUM
    #: The root's rank within the group.
    rootRank: int = 0
    #: None: the group's timeout.
    timeout: timedelta | None = None
    #: True to return before the operation is done.
    asyncOp: bool = False

    @classmethod
    def of(cls, operation: Operation) -> Options:
        """The options that a record of a call stands for."""
        op = ReduceOp.SUM if operation.reduce_op is None else operation.reduce_op
        return cls(op, operation.root, operation.limit, operation.is_async)


def seconds_of(timeout: timedelta) -> float:
    """A timeout in seconds, or a TypeError if it is not a timedelta."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout must be a datetime.timedelta, got {timeout!r}; "
            f"for seconds write timedelta(seconds={timeout!r})"
        )
    return timeout.total_seconds()


def shape_of(size: Sequence[int | Sequence[int]]) -> torch.Size:
    """The shape that the arguments of ``empty(*size)`` mean: numbers, or a sequence of them."""
    dims: Any = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return torch.Size(dims)


class FastPath:
    """Calls from Python to the core that skip all preparation, for plain contiguous tensors.

    A call does the complete operation, or starts it, or refuses: then nothing has happened, and the
    caller uses the group's methods, which prepare tensors and raise errors about arguments. This
    base class, for backends without a fast path, refuses every call.
    """

    def run(
        self,
        operation: str,
        inputs: Tensor | Sequence[Tensor] | None,
        outputs: Tensor | Sequence[Tensor] | None,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
        in_rows: Sequence[int] | None = None,
        out_rows: Sequence[int] | None = None,
        /,
    ) -> bool:
        """Run a collective, and block until it is done. Returns False if the call is refused.

        Args:
            operation: The name of a collective in :data:`~tilework.comm.forms.FORMS`.
            inputs: The tensor that is read on this rank, or a tensor for each rank; None: nothing.
            outputs: The tensor that is written on this rank, or a tensor for each rank; None:
                nothing. A broadcast passes the tensor here on every rank, also on the root.
            reduce_op: The reduction, if the operation reduces.
            root: The root's rank within the group.
            in_rows: Rows of dim 0 for each rank, if ``inputs`` is not divided equally.
            out_rows: Rows of dim 0 for each rank, if ``outputs`` is not divided equally.
        """
        return False

    def post(
        self,
        operation: str,
        inputs: Tensor | Sequence[Tensor] | None,
        outputs: Tensor | Sequence[Tensor] | None,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
        in_rows: Sequence[int] | None = None,
        out_rows: Sequence[int] | None = None,
        /,
    ) -> Work | None:
        """Start a collective with the arguments of :meth:`run`; return the Work, None: refused."""
        return None

    def send(self, tensor: Tensor, dst: int, tag: int, /) -> bool:
        """Send to group rank ``dst``; block until the tensor may be reused. False: refused."""
        return False

    def recv(self, tensor: Tensor, src: int, tag: int, /) -> int:
        """Receive from group rank ``src`` (-1: any); block; return the sender, or -2 if refused."""
        return -2

    def isend(self, tensor: Tensor, dst: int, tag: int, /) -> Work | None:
        """Start to send to group rank ``dst``; return the Work, None if refused."""
        return None

    def irecv(self, tensor: Tensor, src: int, tag: int, /) -> Work | None:
        """Start to receive from group rank ``src`` (-1: any); return the Work, None if refused."""
        return None


#: Refuses every operation.
NO_FAST_PATH = FastPath()

_DEFAULTS = Options()


_OURS = (
    "a tilework process group. torch.distributed's functions need a group from "
    "torch.distributed.new_group; tilework's functions accept those as well after "
    'torch.distributed.init_process_group("tilework")'
)


def _method(name: str, does: str) -> Callable[..., Work]:
    """A group's method for a collective, with torch's arguments: outputs, inputs, options."""
    form = FORMS[name]

    def method(self: ProcessGroup, *args: Any, opts: Options | None = None) -> Work:
        if len(args) > form.argument_count:
            *args, opts = args  # type: ignore[assignment]
        if opts is None:
            opts = _DEFAULTS
        self.check_options(opts)
        options = opts.reduceOp, opts.rootRank, opts.timeout, opts.asyncOp
        works = [self.start(operation) for operation in form.operations(args, *options)]
        return works[0] if len(works) == 1 else self.as_one(works)

    method.__name__, method.__doc__ = form.method, does
    return method


def coalesced(name: str, is_nested: bool = False) -> Callable[..., Any]:
    """A method that calls method ``name`` for several tensors, as one work.

    The arguments are lists of the arguments of ``name``, and options. With ``is_nested``, ``name``
    takes lists itself; outputs that are lists come for each rank here.
    """

    def method(self: Any, *args: Any, opts: Any = None) -> Any:
        lists = [each for each in args if isinstance(each, (list, tuple))]
        if len(lists) < len(args):
            opts = args[-1]
        if is_nested and len(lists) > 1:
            lists[0] = [list(column) for column in zip(*lists[0], strict=True)]
        calls = zip(*lists, strict=True)
        wrapped = ([[each] if is_nested else each for each in call] for call in calls)
        return self.as_one([getattr(self, name)(*call, opts=opts) for call in wrapped])

    method.__name__ = f"{name}_coalesced"
    return method


class Successors(Protocol):
    """Makes the group that replaces a group after ranks were lost, or were started again."""

    def shrink(
        self, group: ProcessGroup, exclude: Sequence[int], timeout: timedelta | None
    ) -> ProcessGroup: ...

    def grow(self, group: ProcessGroup, timeout: timedelta | None) -> ProcessGroup: ...


_Kind = TypeVar("_Kind", bound="_Slots")


class _Slots:
    """The attributes that the core reads from the object's memory: a slot has a fixed offset."""

    __slots__ = ("fast_path", "global_ranks", "group_ranks")

    #: The fast path of operations, tried before the methods of the contract.
    fast_path: FastPath
    #: Global rank of each group rank; set when the group is registered.
    global_ranks: tuple[int, ...]
    #: Group rank of each global rank; set when the group is registered.
    group_ranks: dict[int | None, int]

    def __new__(cls: type[_Kind], *args: Any, **kwargs: Any) -> _Kind:
        self = super().__new__(cls)
        self.fast_path = NO_FAST_PATH
        return self


class ProcessGroup(_Slots):
    """Ranks that run collective operations together, through one backend.

    Operations are collective over the group unless said otherwise: every rank of the group must
    call them in the same order with matching arguments. Ranks in this interface are *group*
    ranks. Tensors are written in place. Each operation returns a :class:`Work`; with
    ``opts.asyncOp`` false the backend may finish before it returns.

    Args:
        rank: This process's rank within the group.
        size: The number of ranks.

    Example:
        >>> class Echo(ProcessGroup):
        ...     def getBackendName(self):
        ...         return "echo"
        >>> Echo(0, 1).name()
        'echo'
    """

    #: True if all_gather, gather and scatter take tensors of different sizes.
    uneven_sizes: bool = True
    #: True if blocking operations that only move data take tensors in rows at equal distances (such
    #: as a block of a matrix's columns) without a copy.
    takes_rows: bool = False
    #: True if operations copy all data that they move, whatever the size.
    holds_copies: bool = False
    #: The promises of the contract that the backend does not keep.
    lacks: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        #: The group's name, for messages; set when the group is registered.
        self.group_name: str = ""
        #: A person's description of the group.
        self.group_desc: str = ""
        self.global_ranks = tuple(range(size))
        self.group_ranks = {rank: rank for rank in range(size)}
        #: The registers that outlive the group's ranks; set when the group is made.
        self.registers: Registers | None = None
        #: The maker of successors of this group; set when the group is registered.
        self.successors: Successors | None = None
        #: In a successor of a group: each rank's number in the old group, None for a newcomer. None
        #: in a group that is not a successor.
        self.origins: tuple[int | None, ...] | None = None

    def rank(self) -> int:
        """This process's rank within the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks in the group."""
        return self._size

    def getBackendName(self) -> str:
        """The backend's name."""
        return type(self).__name__

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroup:
        """The group itself, so that a copy of a module communicates with the same ranks."""
        return self

    def name(self) -> str:
        """The backend's name."""
        return self.getBackendName()

    def check_options(self, opts: object) -> None:
        """Raise TypeError unless ``opts`` are :class:`Options`, as when torch's own code calls."""
        if not isinstance(opts, Options):
            raise TypeError(f"{self!r} is {_OURS}")

    def __bool__(self) -> bool:
        refuse_torch_caller(self, _OURS)
        return True

    def __iter__(self) -> NoReturn:
        refuse_torch_caller(self, _OURS)  # torch would take the group for a list of ranks
        raise TypeError(f"{self!r} is not iterable: global_ranks are the ranks of a group")

    def __str__(self) -> str:
        refuse_torch_caller(self, _OURS)
        return repr(self)

    def __repr__(self) -> str:
        ranks = list(self.global_ranks)
        return f"<{self.name()} group {self.group_name!r} rank {self._rank} of ranks {ranks}>"

    @classmethod
    def reduces(cls, op: AnyReduceOp, dtype: torch.dtype) -> bool:
        """True if the backend itself can reduce ``dtype`` with ``op``.

        Callers ask only for pairs that :func:`~tilework.comm.reduce_op.check_reduction` permits.
        """
        return True

    # -- collectives -----------------------------------------------------------------------

    def start(self, operation: Operation) -> Work:
        """Start a collective. Every call of a collective, by whatever name, ends here.

        A backend overrides either this method or those below, which take the same call in the way
        of torch's backends.
        """
        form = operation.form
        own = getattr(type(self), form.method)
        if own is getattr(ProcessGroup, form.method):
            self._lacks(form.name)
        work: Work = own(self, *form.arguments(operation), Options.of(operation))
        return work

    def collective(
        self,
        name: str,
        inputs: Parts | None,
        outputs: Parts | None,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
        async_op: bool = False,
        rows: tuple[Sequence[int] | None, Sequence[int] | None] | tuple[()] = (),
    ) -> Work | None:
        """Start a collective by the fast path if possible; return the Work, None if it is done.

        For callers that have checked the tensors; see :meth:`FastPath.run` for the arguments.
        ``rows`` are those of the inputs and those of the outputs.
        """
        if not async_op:
            run = self.fast_path.run
            if not rows:
                done = run(name, inputs, outputs, reduce_op, root)
            else:
                done = run(name, inputs, outputs, reduce_op, root, *rows)
            if done:
                return None
        record = Operation.called(name, inputs, outputs, reduce_op, root)
        record.in_rows, record.out_rows = rows or (None, None)
        record.is_async = async_op
        return self.start(record)

    barrier = _method("barrier", "Return once every rank has entered.")
    broadcast = _method("broadcast", "Copy the root's tensor, ``tensors[0]``, to every rank.")
    allreduce = _method(
        "all_reduce", "Combine ``tensors[0]`` over all ranks, in place on every rank."
    )
    reduce = _method("reduce", "Combine ``tensors[0]`` over all ranks on the root.")
    scan = _method(
        "scan", "``tensors[0]`` becomes those of the ranks up to this one combined, in place."
    )
    exscan = _method("exscan", ":meth:`scan` without this rank's own tensor.")
    allgather = _method("all_gather", "``outputs[0][r]`` becomes rank r's ``inputs[0]``.")
    allgather_into_tensor = _method(
        "all_gather_into_tensor",
        "``output``'s r-th part (of equal parts, in memory order) becomes rank r's ``input``.",
    )
    gather = _method("gather", "On the root ``outputs[0][r]`` becomes rank r's ``inputs[0]``.")
    scatter = _method("scatter", "``outputs[0]`` becomes the root's ``inputs[0][rank]``.")
    reduce_scatter = _method(
        "reduce_scatter", "``outputs[0]`` becomes all ranks' ``inputs[0][rank]`` combined."
    )
    reduce_scatter_tensor = _method(
        "reduce_scatter_tensor",
        "``output`` becomes the rank-th of the equal parts of all ranks' ``input`` combined.",
    )
    alltoall = _method("all_to_all", "``outputs[r]`` becomes rank r's ``inputs[rank]``.")
    alltoall_single = _method(
        "all_to_all_single",
        ":meth:`alltoall` over rows: the sizes after the tensors count rows of dim 0 of ``output`` "
        "and ``input`` for each rank; empty means equal.",
    )

    # torch's further names.
    _allgather_base = all_gather_single = allgather_into_tensor
    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_tensor
    alltoall_base = all_to_all_single = alltoall_single

    allreduce_coalesced = coalesced("allreduce", is_nested=True)
    allgather_coalesced = coalesced("allgather", is_nested=True)
    allgather_into_tensor_coalesced = coalesced("allgather_into_tensor")
    reduce_scatter_tensor_coalesced = coalesced("reduce_scatter_tensor")
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        """A blocking barrier whose failure names every missing rank."""
        self.barrier(Options(timeout=timeout)).wait()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send the tensor in ``tensors`` to group rank ``dst``. Not collective.

        The Work is done when the tensor may be overwritten.
        """
        self._lacks("send")

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Receive from group rank ``src`` into the tensor in ``tensors``. Not collective."""
        self._lacks("recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive into the tensor in ``tensors`` from the rank that sends first. Not collective."""
        self._lacks("recv_anysource")

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on the CPU that operations of this group move fastest.

        A plain ``torch.empty`` unless the backend has better memory. With ``shm`` the memory is
        part of the group's segment while there is room. If the tensors of all ranks are in the
        segment (or are contiguous parts of such tensors), operations read them in place, without
        copies through outboxes. The tensor counts as shared memory and cannot be resized; a forked
        child shares it with the parent. The memory is freed after the last view is gone, also after
        the group's end. Not collective; does not block.

        Args:
            size: As for ``torch.empty``: numbers, or one sequence of them.
            dtype: None: torch's default.

        Example:
            >>> import tilework.distributed as dist
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     x = dist.get_default_group().empty(2, 3).fill_(rank)
            ...     dist.all_reduce(x)
            ...     return x.shape, x[0, 0].item()
            >>> run_ranks(2, program)[0]
            (torch.Size([2, 3]), 1.0)
        """
        return torch.empty(shape_of(size), dtype=dtype)

    def agree(self, flag: bool) -> bool:
        """True on every rank if ``flag`` is true on all ranks, else False on every rank.

        Collective; blocks. If a rank died, all other ranks raise PeerLostError.

        Example:
            >>> import tilework.distributed as dist
            >>> from tilework.testing import run_ranks
            >>> run_ranks(2, lambda rank: dist.get_default_group().agree(rank == 0))
            [False, False]
        """
        device = getattr(self, "devices", ("cpu",))[0]
        votes = torch.tensor([1 if flag else 0], dtype=torch.int32, device=device)
        self.allreduce([votes], Options(ReduceOp.MIN)).wait()
        return bool(votes.item())

    # -- lifetime -------------------------------------------------------------------------

    def shrink(
        self, ranks_to_exclude: Sequence[int] = (), timeout: timedelta | None = None
    ) -> ProcessGroup:
        """The group of the ranks that are left; see ``tilework.distributed.shrink_group``."""
        return self._successors().shrink(self, ranks_to_exclude, timeout)

    def grow(self, timeout: timedelta | None = None) -> ProcessGroup:
        """The group with the ranks that came back; see ``tilework.distributed.grow_group``."""
        return self._successors().grow(self, timeout)

    def departed(self) -> Sequence[int]:
        """The group ranks that the backend knows to have ended or left. Local, never blocks."""
        return ()

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        """The group ranks that wait for this rank in an operation that this rank has not called.

        Each element is the group rank, the operation's number, and a description of the operation.
        Only waits of a rank's own thread count, because the rank can do nothing else in that time.
        Local, never blocks for long.
        """
        return ()

    def last_entered(self) -> Sequence[str]:
        """The operation that each group rank entered last, in words; empty if unknown.

        Local, never blocks.
        """
        return ()

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        """The collective that the calling thread waits in, and the ranks that it waits for.

        The collective is given by number, the ranks are group ranks; some of them may have come
        meanwhile. None if the calling thread is not this rank's own thread, waits in no collective
        of this group, or waits with an explicit time limit.
        """
        return None

    def messages_under_way(self) -> Sequence[Entry] | None:
        """The messages of this rank that have begun and not ended.

        None if the caller is not the rank's own thread, or the backend does not know, or a sent
        message may still be in flight. Local, never blocks.
        """
        return None

    def message_wait(self) -> MessageWait | None:
        """The wait of the calling thread for a message of this group; None if none is known.

        Never blocks.
        """
        return None

    def why_aborted(self) -> DistBackendError | None:
        """The error that every operation raises once the group is aborted; None before. Local."""
        return None

    def abort_for(self, kind: str, ranks: Sequence[int], text: str) -> None:
        """Abort the group because of a fault of global ``ranks``. Not collective.

        Args:
            kind: The kind of error that operations raise: "mismatch", "peer_lost" or "timeout".
            ranks: The ranks at fault.
            text: The reason.
        """
        self.abort(text)

    def _successors(self) -> Successors:
        if self.successors is None:
            raise ValueError(f"{self!r} is not registered: make it with init_process_group")
        return self.successors

    def get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has entered on this group."""
        raise NotImplementedError(f"backend {self.name()!r} does not count collectives")

    @property
    def authenticated(self) -> bool:
        """True if only ranks of this job can be on the other end (see docs/decisions)."""
        return True

    def statistics(self) -> dict[str, Any]:
        """Counters of this rank's end of the group, by name."""
        return {}

    def flight_entries(self) -> list[Entry]:
        """This rank's last operations in the group, oldest first; empty if none are kept.

        Takes no lock and never blocks: any thread may call at any time.
        """
        return []

    def flight_tails(self) -> list[Tail]:
        """This rank's operations in the group from now on, for a single reader; a tail for each
        backend of the group, none if no operations are recorded.
        """
        return []

    def cut_tails(self) -> None:
        """Keep nothing more for the reader of the tails."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time that later operations may wait for other ranks."""
        raise NotImplementedError(
            f"backend {self.name()!r} cannot change the timeout of a group that exists; pass "
            f"timeout= when you make the group"
        )

    def abort(self, reason: str = "abort() was called") -> None:
        """Make every present and future operation raise on every rank, as if this rank had died.

        Never blocks.
        """

    def close(self) -> None:
        """Leave the group and free the group's resources. Idempotent, not collective."""

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:
        """The part of this group for tensors on ``device``; this group if it has no parts."""
        return self

    def shutdown(self) -> None:
        """The same as ``close``: leave the group. Not collective."""
        self.close()

    @property
    def bound_device_id(self) -> None:
        """None: groups are bound to no device."""
        return None

    def as_one(self, works: list[Work]) -> Work:
        """A single Work for several, which complete in order."""
        return works[0] if len(works) == 1 else SeveralWorks(works)

    def _lacks(self, operation: str) -> NoReturn:
        raise NotImplementedError(
            f"backend {self.name()!r} does not implement {operation}; "
            f"use a backend that does (shm and threads implement every operation)"
        )
