"""A rank in a process: ``worker.py CORE SCENARIO FD RANK SIZE``. Loads the core alone, not torch.

Reports are lines of JSON on standard output.
"""

from __future__ import annotations

import array
import importlib.util
import json
import os
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


def all_reduce(group: Any, values: array.array[float], timeout: float = 20.0) -> None:
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


def until_fault(group: Any, nbytes: int = 8, timeout: float = 20.0) -> None:
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


SCENARIOS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("scenario_"): function
    for name, function in list(globals().items())
    if name.startswith("scenario_")
}
SCENARIOS[scenario](core.Group(fd, rank, size, NONCE))
