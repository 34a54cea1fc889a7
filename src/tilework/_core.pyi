"""The shared-memory core: one group of ranks over one sealed memfd. See csrc/."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, UntypedStorage

from tilework.comm import contract
from tilework.comm.contract import Work

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Tensor = TypeVar("_Tensor", bound=Tensor)

#: Bumped whenever the segment's layout changes; ranks with another value cannot join.
ABI: int

#: Slots of this size measure best; the argument for create_segment where there is no other reason.
DEFAULT_SLOT_BYTES: int
#: The most ranks of a group.
MAX_RANKS: int

class Fault(RuntimeError):
    """What the core raises; the shm backend turns it into tilework's errors.

    ``args == (kind, ranks, text)``: kind is one of "mismatch", "peer_lost", "timeout",
    "aborted", "closed"; ranks are group ranks at fault; text is detail for a person
    (for "aborted": the text given to abort(), and ranks == (the aborting rank,)).
    """

# Operation kinds, dtypes and reduce operations are small ints, in dicts by torch's names.
KINDS: dict[str, int]  # as in tilework.comm.forms.Kind
DTYPES: dict[
    str, int
]  # float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128 bytes
REDUCE_OPS: dict[str, int]  # none sum avg product min max band bor bxor premul_sum

#: Sizes in bytes at which algorithms take over from each other, by name; see csrc/transport/tunables.h.
DEFAULT_TUNABLES: dict[str, int]

#: The value of a tunable that no message reaches.
NEVER_BYTES: int

def create_segment(
    size: int, slot_bytes: int, nonce: bytes, tunables: Mapping[str, int] = ...
) -> int:
    """A sealed memfd (F_SEAL_SHRINK|GROW|SEAL, close-on-exec) for `size` ranks; returns the fd.
    All ranks use its `tunables`, which are the defaults but for those given."""

def calibrate(
    cpus: Sequence[int], ranks: int = 2, huge: bool = False, insists: bool = False
) -> tuple[dict[str, int], list[tuple[str, int, str, float]]]:
    """(the tunables that are best on this host, [(operation, bytes of a message, way, seconds)]).
    Measured for some 0.3 s with an even number of ranks on the first of `cpus`; `huge`: long tensors have huge
    pages. RuntimeError where other programs still keep taking those for 0.1 s, unless `insists`."""

def crc32(address: int, nbytes: int, crc: int = 0) -> int:
    """The checksum of memory, as zlib.crc32 computes it; ``crc`` is that of what is before it."""

def copy_streamed(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy memory past the caches, with the GIL released: addresses to and from, and bytes."""

def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to bring bytes of a file to the disk. A hint: no errors."""

_Runs: TypeAlias = tuple[int, int, int, list[int], list[int], list[int]]

class FileReader:
    """Reads parts of files whose chunks have checksums; one thread at a time."""

    def read(
        self, reads: list[tuple[int, int, int, _Runs, int, int, bytes, bytes]], chunk: int
    ) -> tuple[int, int, int | None, int] | None:
        """Read what is wanted of parts of files, one after the other, with the GIL released.

        Each is ``(fd, offset, nbytes, runs, begin, end, checksums, checked)``: a part of ``nbytes``
        from ``offset`` on, of which chunks from ``begin`` to ``end`` are read. ``checksums`` are
        uint32, one for each chunk of the part, and ``checked`` a byte for each: not 0 if it is to be
        compared. ``runs``: an address (0: nothing is wanted), where the first run begins in the
        part, a run's bytes, and for each dim: the number of runs, their distance there and at the
        address.

        What is wrong with the first that cannot be read: its number, the number of a chunk, the
        checksum that this has, None where the file ends, and the system's error, 0 if it has none.
        """

    def read_shares(
        self,
        reads: list[tuple[int, int, int, _Runs, int, int, int]],
        chunk: int,
        shares: int,
        count: int,
    ) -> tuple[int, int, int | None, int] | None:
        """Read likewise what is wanted, and nothing else.

        Each is ``(fd, offset, nbytes, runs, begin, end, place)``. The shares of its bytes in the
        checksums of the part's chunks are added (exclusive or) to ``count`` uint32 at the address
        ``shares``, from number ``place`` on. The exclusive or over all who read some, and crc32() of
        as many zeros, is the chunk's checksum.
        """

def segment_bytes(size: int, slot_bytes: int) -> int: ...
def worked_within(from_: int, to: int, works_since: int, waits_since: int) -> int:
    """The part of a time in which a rank had work to do (csrc/transport/wait_history.h)."""

class WaitHistory:
    """What a rank learns from its waits (csrc/transport/wait_history.h): pure, times are the caller's."""
    def __init__(self) -> None: ...
    def pace(self, threads: int, cores: int) -> tuple[int, int, int, bool]:
        """(first yield, end of a short wait, sleep: in ns since the start; crowded)."""
    def record(self, waited_ns: int, threads: int, cores: int) -> None: ...
    def avoids_yields(self, now: int) -> bool: ...
    def record_yield(self, now: int, ns: int) -> None: ...
    def record_yields(self, now: int, in_vain: bool) -> None: ...
    def should_look(self) -> bool: ...
    def should_move(self, now: int) -> bool: ...

class Completion:
    """The handle of a submitted operation. A short one is executed by who waits for it; the core's
    thread looks after it now and then, and at once where a callback is to come."""
    def done(self) -> bool: ...
    def poll(self) -> bool:
        """done(), after a try to get on with it that never waits for other ranks."""
    def wait(self, timeout: float) -> bool:
        """Block (GIL released, signals honoured) until done; False after `timeout` seconds
        (negative: no bound). Raises Fault if the operation failed."""
    def fault(self) -> tuple[str, tuple[int, ...], str] | None:
        """The failure of a done operation, None if it succeeded."""
    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call fn() with the GIL held once done: from the core's thread, or at once."""
    def source(self) -> int:
        """For a receive: the group rank it came from (-1 before done)."""

#: (number of the collective or 0 for a message, what it is (flight.ring.What), (code object, line)
#: of the program that called or None, entered, ended or 0, failure or None, pending or None, peer
#: or None, tag). Times in nanoseconds since 1970.
Record = tuple[
    int, Any, tuple[CodeType, int] | None, int, int, str | None, Any, int | None, int
]  # fmt: skip

#: A slot, the operation in it, and the times when a thread first waited for the operation and when
#: the operation was done: 0 if unknown, or not yet.
TimedRecord = tuple[int, Record, int, int]

def shape_label(shape: tuple[int, ...]) -> int:
    """The label of a shape, for run() and submit()."""

def register_torch(
    tensor_type: type,
    parameter_type: type,
    increment_version: Callable[[Any], None],
    reductions: dict[object, str],
    in_library: Mapping[str, bool],
) -> bool:
    """Register the torch types and functions that FastPath needs; False if this torch exports no
    DLPack exchange table. `in_library` maps a file name to True if it is not the program's own."""

def set_tensor_layout(impl: int, flags: int, negative: int, counter: int, number: int) -> None:
    """Set the places in torch's tensors that comm.backends.tensor_layout finds; zeros: none is known."""

def is_negative(tensor: Tensor) -> bool:
    """True if a tensor's values are to be negated when they are read. After register_torch only."""

def bump_version(tensor: Tensor) -> None:
    """Count up a tensor's version, for autograd. After register_torch only."""

def register_world(variable: ContextVar[Any], world_type: type, group_type: type) -> None:
    """Register where `fast_function` finds groups: the ContextVar of a rank's World, the classes of
    Worlds (with a slot `default_group`) and of groups (`fast_path`, `group_ranks`, `global_ranks`)."""

def fast_function(function: _Function, inputs: str, outputs: str) -> _Function:
    """A public operation whose usual calls the core takes itself; the others it hands to
    `function`, for which it stands in all respects (csrc/python/fast_function.h). `inputs`, `outputs`: the
    parameters that are those, "" for none."""

def set_long_wait(fn: Callable[[], None] | None, seconds: float) -> None:
    """Set the function that threads call now and then which wait for other ranks longer than
    ``seconds``. What it raises ends the wait."""

def set_core_limit(cores: int) -> None:
    """Set the cores' worth of time that this process's control group grants, rounded up; 0: all. Groups
    that are made afterwards count with it."""

def set_profiled(profiled: bool) -> None:
    """Have every FastPath refuse from now on, or not: a profiler is to see operations."""

#: How random numbers are distributed: small ints by name.
DISTRIBUTIONS: dict[str, int]  # uniform normal integers bernoulli
#: Levels of the instruction set that this processor has and the core was compiled for, best last.
LEVELS: dict[str, int]  # baseline avx2 avx512

def fill_random(
    address: int,
    dtype: int,
    distribution: int,
    seed: int,
    stream: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    a: float,
    b: float,
    level: int = ...,
) -> None:
    """Write the part (offsets, sizes) of a random tensor of this global shape to row-major memory,
    with the GIL released. Each value depends on seed, stream (both modulo 2**64), distribution,
    dtype and its global row-major index alone (csrc/kernels/random.h), not on the level: a higher one than
    there is means the best.

        uniform    [a, b)                         float64 float32 float16 bfloat16
        normal     mean a, standard deviation b   float64 float32 float16 bfloat16
        integers   [a, b), ints; b - a <= 2**64   every integer dtype, bool
        bernoulli  b with probability a, else 0   float64 float32 float16 bfloat16 bool

    ValueError: no such distribution of the dtype, or no such part. Values of a and b that the dtype
    does not have are not looked for."""

def operator_call(
    python: Any, values_matter: bool
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """The fast path of an operator's calls on DTensors: ``run(func, args, kwargs)``. `python` has
    what it needs as attributes, see csrc/python/operator_call.h; `values_matter`: numbers among the arguments are
    part of a call's key."""

def torch_function(handlers: dict[Any, Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A ``__torch_function__`` that calls the function's handler, where there is one and no argument
    is named; else `otherwise`, a ``__torch_function__``, too."""

def wrap_as(kind: type[_Tensor], local: Tensor, spec: Any, digest: int | None = None, /) -> _Tensor:
    """The function of this name in tilework.dtensor.base."""

def set_provenance(digest: int, /) -> int:
    """Set the digest that collectives which this thread calls carry in their headers (modulo 2**64;
    0: none), and that all ranks must have in common; returns the one before."""

def provenance() -> int:
    """The digest that collectives of this thread carry."""

def hash_content(address: int, bytes: int) -> int:
    """A 64-bit hash of memory."""

def hash_samples(
    address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, samples: int
) -> int:
    """A 64-bit hash of as many elements of a tensor, at even distances in row-major order, the first
    and the last among them. ValueError: fewer than two, or an empty tensor."""

class Arena:
    """Memory in the segment, for buffers that the core's operations use where they are."""
    def allocate(self, bytes: int) -> int:
        """An address, aligned to 64; 0 where there is no room."""
    def release(self, address: int) -> None: ...
    def used_bytes(self) -> int: ...

def set_storage_layout(data: int, context: int, deleter: int, free_memory: int) -> None:
    """Offsets within torch's storage object, and the function that stands at `deleter`."""

class MemoryHold:
    """Keeps the memory that storages have now, whatever memory they get later."""
    def __init__(
        self, storages: Sequence[UntypedStorage], written: Sequence[tuple[int, int, int]]
    ) -> None:
        """`written`: (a storage's _cdata, an address in its memory, bytes) of what an operation writes.
        Holds nothing before set_storage_layout, or after it had no free_memory."""

    def copy_to_moved(self) -> None:
        """Copy what was written to where storages have their memory now, as far as that reaches."""

    def release(self) -> None:
        """Free what storages have let go, as the end of this object does; idempotent."""

class FlightRing:
    """A ring of the last operations: comm.flight.ring.Ring in the core, which FastPath writes too."""
    def __init__(self, capacity: int) -> None: ...
    def begin(self, what: Any, peer: int | None = None, tag: int = 0, depth: int = 1) -> int: ...
    def end(self, slot: int, failure: str = "") -> None: ...
    def follow(self, slot: int, pending: Any) -> None: ...
    def records(self) -> list[Record]:
        """The operations in the ring, oldest first."""
    def since(self, first: int, also: Sequence[int]) -> tuple[int, int, list[TimedRecord]]:
        """The operations from slot `first` on, and those of the slots in `also`, that are still here;
        before them the next slot, and the wall clock's nanoseconds less the monotonic clock's."""
    def grow(self, capacity: int) -> None:
        """Keep at least `capacity` operations from now on."""

class FastPath(contract.FastPath):  # which has the same methods, and no base
    """A group's operations on torch's tensors, with the least overhead. One that needs any
    preparation is refused (False, -2 or None), with nothing done.

    `on_failure(why, slot, operation, inputs, outputs, reduce_op, root)`: why is a Fault's args, and it
    raises what that is for the program; or the exception of a signal handler, on its way.
    Either way it ends the slot in the flight ring.

    `make_work(call, operation, inputs, outputs, reduce_op, root)`: the Work of an operation that was
    started; call is None if it is done. Lists of tensors have become tuples; messages, named "send" and
    "recv", have a tag and the other side for the last two."""

    timeout: float
    def __init__(
        self,
        group: Group,
        flight: FlightRing,
        timeout: float,
        on_failure: Callable[..., None],
        make_work: Callable[..., Work],
    ) -> None: ...

class PostedCall:
    """An operation that a FastPath has started. Until it is finished, or, if nobody has it any more,
    done, its tensors and their memory stay."""

    @property
    def completion(self) -> Completion: ...
    @property
    def slot(self) -> int:
        """Its slot in the flight ring."""
    def site(self) -> tuple[CodeType, int] | None:
        """The program's call: a code object and a line."""
    def what(self) -> Any:
        """The operation, as a flight.ring.What, with the shapes that it was called with."""
    def finish(self, blocks: bool) -> bool:
        """True if it has ended well: then its outputs look written, the flight ring has the end, and
        its tensors are let go. False where it goes on, unless `blocks`, and where it failed."""
    def let_go(self) -> None:
        """Keep its tensors no longer."""

class Group:
    """One rank's end of a group. All methods may be called from any thread."""

    def __init__(self, fd: int, rank: int, size: int, nonce: bytes, of_threads: bool = ...) -> None:
        """Map the segment (fd may be closed afterwards), check magic, ABI, size, nonce and
        seals (ValueError otherwise), publish this rank's pid. Does not wait for peers.
        `of_threads`: the other ranks are threads of this process, and come by `beside`."""

    def beside(self, rank: int) -> Group:
        """The end of `rank`, whose own thread calls this; it shares this end's mapping. With
        `of_threads` a rank has left the group, for the others, when its own thread ends."""

    # Buffers are (address, bytes). N = size. What each kind takes:
    #   barrier         inputs []                outputs []
    #   broadcast       inputs []                outputs [buf]        (root's buf is the source)
    #   all_reduce      inputs [src]             outputs [dst]        (src == dst: in place)
    #   reduce          inputs [src]             outputs [dst] at root, [] elsewhere
    #   all_gather      inputs [src]             outputs N bufs       (sizes may differ by rank)
    #   gather          inputs [src]             outputs N bufs at root, [] elsewhere
    #   scatter         inputs N bufs at root    outputs [dst]
    #   reduce_scatter  inputs N bufs            outputs [dst]
    #   all_to_all      inputs N bufs            outputs N bufs
    def run(
        self,
        kind: int,
        dtype: int,
        reduce_op: int,
        root: int,
        factor: float,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        label: int,
        timeout: float,
    ) -> None:
        """Run a collective, in order after those submitted; block until this rank is done.
        `label` is any 64-bit value that must be equal on all ranks, but for 0, which goes with any."""

    def submit(
        self,
        kind: int,
        dtype: int,
        reduce_op: int,
        root: int,
        factor: float,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        label: int,
        timeout: float,
    ) -> Completion:
        """As run, but on the group's progress thread (started on first use). The caller keeps
        the buffers alive until it is done."""

    def isend(
        self,
        dst: int,
        address: int,
        nbytes: int,
        dtype: int,
        tag: int,
        timeout: float,
        label: int = 0,
    ) -> Completion: ...
    def irecv(
        self,
        src: int,
        address: int,
        nbytes: int,
        dtype: int,
        tag: int,
        timeout: float,
        label: int = 0,
    ) -> Completion:
        """src == -1 receives from any rank."""
    def lost_ranks(self) -> list[int]:
        """The ranks whose processes have ended or become other programs, or that left the group."""

    def blocked_ranks(self) -> list[tuple[int, int]]:
        """The ranks whose own threads wait in an operation that this rank has not called, with the
        operation's number."""

    def last_wait(self) -> int:
        """The number of the last operation that this rank's own thread waited in; 0: none yet."""

    def headers(self) -> list[tuple[int, str, str, str, int, int, int]]:
        """The last collective each rank entered: (sequence number, kind, dtype, reduce_op, root,
        bytes, pid). Sequence number 0: none yet."""
    def cores(self) -> int:
        """The cores that the ranks which have joined may use together."""
    def sequence(self) -> int:
        """How many collectives this rank has entered or submitted."""
    def report_failure(self, text: str) -> None:
        """Publish why this rank fails (at most 2000 bytes, truncated), for peers to read."""
    def failure_reports(self, timeout: float) -> list[str | None]:
        """Every rank's failure report, after waiting up to `timeout` seconds for all of them."""
    def abort(self, kind: str, text: str) -> None:
        """Make every present and future operation on every rank raise Fault("aborted") unless
        its own cause is already known. The first abort wins; kind and text are kept."""
    def aborted(self) -> tuple[int, str, str] | None:
        """(rank, kind, text) of the abort, None if there was none."""
    def arena(self) -> Arena:
        """This rank's own arena; it may be kept after the group is closed."""
    def close(self) -> None:
        """Leave: peers that still need this rank get Fault("peer_lost"). Idempotent; fails
        pending operations with "closed" and joins the core's threads."""
    def single_copy(self) -> str:
        """How ranks read each other's memory, or why they cannot, for people."""
    def tunables(self) -> dict[str, int]: ...
    def statistics(self) -> dict[str, int]:
        """operations, bytes, sleeps (futex waits), segment_bytes."""
