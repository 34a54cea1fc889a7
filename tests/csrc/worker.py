"""A rank in a process: ``worker.py CORE SCENARIO FD RANK SIZE``. Loads the core alone, not torch.

Reports are lines of JSON on standard output.
"""

from __future__ import annotations

import array
import ctypes
import importlib.util
import json
import mmap
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

NONCE = b"a nonce of sixteen"


def load_core(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("tilework._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


core = load_core(sys.argv[1])
scenario, fd, rank, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])


def say(report: object) -> None:
    os.write(1, f"{json.dumps(report)}\n".encode())  # at once: threads may report together


def all_reduce(group: Any, values: array.array[float], timeout: float = 120.0) -> None:
    address, count = values.buffer_info()
    buffers = [(address, count * values.itemsize)]
    sum_of_doubles = core.KINDS["all_reduce"], core.DTYPES["float64"], core.REDUCE_OPS["sum"]
    group.run(*sum_of_doubles, 0, 1.0, buffers, buffers, 0, timeout)


def error_of(call: Callable[[], None]) -> list[Any]:
    """What a call that must fail raised, and when."""
    try:
        call()
    except core.Fault as fault:
        kind, ranks, text = fault.args
        return [kind, list(ranks), text, time.monotonic()]
    raise AssertionError("it did not fail")


def until_fault(group: Any, nbytes: int = 8, timeout: float = 120.0) -> None:
    """all_reduce for ever, ready once all are in; report the first fault and when it came."""
    values = array.array("d", [1.0]) * (nbytes // 8)
    all_reduce(group, values)
    say("ready")

    def loop() -> None:
        while True:
            all_reduce(group, values, timeout)

    say(error_of(loop))


def scenario_sum(group: Any) -> None:
    for count in (1, 1000, 100_000):
        values = array.array("d", [rank + 1.0]) * count
        all_reduce(group, values)
        say([values[0], values[-1], count])


def scenario_loop(group: Any) -> None:
    until_fault(group)


def scenario_loop_large(group: Any) -> None:
    until_fault(group, 1 << 20)


def scenario_loop_impatient(group: Any) -> None:
    until_fault(group, timeout=0.4)


def scenario_leave(group: Any) -> None:
    if rank == 0:
        group.close()
        say("left")
        time.sleep(20)
    say(error_of(lambda: all_reduce(group, array.array("d", [1.0]))))


def scenario_receive(group: Any) -> None:
    address, _ = (values := array.array("d", [0.0])).buffer_info()
    say("ready")
    completion = group.irecv(0, address, values.itemsize, core.DTYPES["float64"], 0, 20.0)
    say(error_of(lambda: completion.wait(-1)))


def scenario_interrupt(group: Any) -> None:
    values = array.array("d", [1.0])
    say("ready")
    try:
        all_reduce(group, values)
    except KeyboardInterrupt:
        say(["interrupted", time.monotonic()])
    say(error_of(lambda: all_reduce(group, values)))


def submit_sum(group: Any, values: array.array[float]) -> Any:
    buffers = [(values.buffer_info()[0], len(values) * values.itemsize)]
    kind, dtype, op = core.KINDS["all_reduce"], core.DTYPES["float64"], core.REDUCE_OPS["sum"]
    return group.submit(kind, dtype, op, 0, 1.0, buffers, buffers, 0, 20.0)


def scenario_interrupt_behind_another(group: Any) -> None:
    first, second = array.array("d", [1.0]), array.array("d", [1.0])
    completion = submit_sum(group, first)
    say("ready")
    try:
        all_reduce(group, second)  # waits for the first, which waits for the other rank
    except KeyboardInterrupt:
        say(["interrupted", time.monotonic()])
    say(completion.fault()[0])


def scenario_collective_in_a_signal_handler(group: Any) -> None:
    values = array.array("d", [1.0])
    signal.signal(signal.SIGINT, lambda number, frame: all_reduce(group, values))
    say("ready")
    try:
        all_reduce(group, values)
    except RuntimeError as error:
        say(str(error))


def scenario_exit_while_pending(group: Any) -> None:
    values = array.array("d", [1.0])
    completion = submit_sum(group, values)
    completion.add_done_callback(lambda: say(completion.fault()[0]))
    receive = group.irecv(1, values.buffer_info()[0], 8, core.DTYPES["float64"], 0, 20.0)
    receive.add_done_callback(lambda: say(receive.fault()[0]))


def scenario_fork(group: Any) -> None:
    before = array.array("d", [1.0])
    submit_sum(group, before).wait(-1)  # so that there is a thread
    child = os.fork()
    if child == 0:
        try:
            all_reduce(group, array.array("d", [1.0]))
        except core.Fault as fault:
            say([fault.args[0], fault.args[2]])
        del group
        os._exit(0)
    os.waitpid(child, 0)
    values = array.array("d", [1.0])
    all_reduce(group, values)
    say(values[0])


# Operations whose data peers read from this rank's memory.

Numbers = array.array  # of int64


def numbers(sender: int, receiver: int, count: int) -> Numbers[int]:
    """What one rank sends to another."""
    return array.array("q", ((i * 7 + sender * 31 + receiver * 101) % 1009 for i in range(count)))


def summed(parts: list[Numbers[int]]) -> Numbers[int]:
    return array.array("q", map(sum, zip(*parts, strict=True)))


def run(
    group: Any, kind: str, inputs: list[Numbers[int]], outputs: list[Numbers[int]], root: int = 0
) -> None:
    reduce_op = core.REDUCE_OPS["sum" if "reduce" in kind else "none"]
    given, taken = (
        [(a.buffer_info()[0], len(a) * a.itemsize) for a in side] for side in (inputs, outputs)
    )
    group.run(core.KINDS[kind], core.DTYPES["int64"], reduce_op, root, 1.0, given, taken, 0, 20.0)


def is_right(group: Any, kind: str, count: int = 3000) -> bool:
    """Run an operation; True if it brought what it should."""
    ranks, root = range(size), size - 1
    mine = numbers(rank, 0, count)
    blank = [array.array("q", bytes(8 * count)) for _ in ranks]
    if kind == "send":
        return ring(group, count)
    if kind == "broadcast":
        run(group, kind, [], [mine], root)
        return mine == numbers(root, 0, count)
    if kind == "all_reduce":
        run(group, kind, [mine], [mine])
        return mine == summed([numbers(r, 0, count) for r in ranks])
    if kind in ("all_gather", "gather"):
        outputs = blank if kind == "all_gather" or rank == root else []
        run(group, kind, [mine], outputs, root)
        return all(numbers(r, 0, count) == outputs[r] for r in ranks[: len(outputs)])
    parts = [numbers(rank, to, count) for to in ranks]
    if kind == "scatter":
        run(group, kind, parts if rank == root else [], blank[:1], root)
        return blank[0] == numbers(root, rank, count)
    if kind == "all_to_all":
        run(group, kind, parts, blank)
        return all(blank[r] == numbers(r, rank, count) for r in ranks)
    run(group, kind, parts, [parts[rank]])  # reduce_scatter, in place
    return parts[rank] == summed([numbers(r, rank, count) for r in ranks])


def ring(group: Any, count: int) -> bool:
    """A long message to the next rank, and one from the one before."""
    count *= 8
    sent, got = numbers(rank, 0, count), array.array("q", bytes(8 * count))
    source, (address, _) = (rank - 1) % size, got.buffer_info()
    dtype = core.DTYPES["int64"]
    receive = group.irecv(source, address, 8 * count, dtype, 0, 20.0)
    send = group.isend((rank + 1) % size, sent.buffer_info()[0], 8 * count, dtype, 0, 20.0)
    return bool(receive.wait(-1) and send.wait(-1) and got == numbers(source, 0, count))


READ = (
    "send",
    "broadcast",
    "all_reduce",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "reduce_scatter",
)


def wrong(group: Any) -> list[str]:
    return [kind for kind in READ if not is_right(group, kind)]


def report(group: Any) -> None:
    say([wrong(group), group.statistics()["read_bytes"], group.single_copy()])


def refuse_reading() -> None:
    """Have the kernel refuse process_vm_readv to this thread from now on (seccomp)."""
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    allow, refuse = 0x7FFF0000, 0x00050001
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, allow)]

    class Step(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("jt", ctypes.c_uint8),
            ("jf", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Step)))

    program = Program(len(steps), (Step * len(steps))(*(Step(*step) for step in steps)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def scenario_read(group: Any) -> None:
    report(group)


def scenario_read_refused(group: Any) -> None:
    if rank == 1:
        refuse_reading()
    report(group)


def scenario_read_unreadable(group: Any) -> None:
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    if rank == 1:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process may look
    report(group)


def scenario_read_refused_later(group: Any) -> None:
    kind = scenario.partition(":")[2]
    first = [kind for kind in READ if not is_right(group, kind)]
    before = group.statistics()["read_bytes"]
    if rank == 1:
        refuse_reading()
    say([[*first, *([] if is_right(group, kind) else [kind])], before, wrong(group)])


def scenario_read_unmapped(group: Any) -> None:
    report(group)
    count = 1 << 20
    outputs = [array.array("b", bytes(count)) for _ in range(size)]
    if rank == 1:
        with mmap.mmap(-1, count) as region:
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(count))
            say("unmapped")
            gather_bytes(group, address, outputs)
    say("ready")
    mine = array.array("b", bytes(count))
    say(error_of(lambda: gather_bytes(group, mine.buffer_info()[0], outputs)))


def gather_bytes(group: Any, address: int, outputs: list[array.array[int]]) -> None:
    count = len(outputs[0])
    taken = [(out.buffer_info()[0], count) for out in outputs]
    kind, dtype = core.KINDS["all_gather"], core.DTYPES["uint8"]
    group.run(kind, dtype, 0, 0, 1.0, [(address, count)], taken, 0, 20.0)


SCENARIOS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("scenario_"): function
    for name, function in list(globals().items())
    if name.startswith("scenario_")
}
SCENARIOS[scenario.partition(":")[0]](core.Group(fd, rank, size, NONCE))
