"""Python programs that start at once, with torch loaded: forked from the server of jobs.py.

As ``python …`` otherwise: a process, working folder, environment and arguments of its own, whose
output and exit status are returned.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.jobs import CONTEXT

FORK = multiprocessing.get_context("fork")


def run_warm(
    *command: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
    loaded: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """What became of ``python *command``; the command is a script, or -m and a module.

    The modules ``loaded`` are loaded before; tests that name the same ones share that.
    """
    return call_warm(_run, *command, cwd=cwd, env=env, timeout=timeout, loaded=loaded)


def call_warm(
    fn: Callable[..., object],
    *args: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
    loaded: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """What became of a process that called ``fn(*args)``, as a program."""
    _wait_for_server()
    start = _server(loaded).call if loaded else functools.partial(_status_of, CONTEXT)
    place = _Place(cwd or Path.cwd(), dict(env or os.environ))
    with tempfile.TemporaryDirectory() as folder:
        place.outputs = Path(folder, "out"), Path(folder, "err"), Path(folder, "next")
        status = start(_become, (fn, args, place), timeout)
        while status is not None and place.outputs[2].exists():
            fn, args = _run, json.loads(place.outputs[2].read_text())
            place.outputs[2].unlink()
            status = start(_become, (fn, args, place), timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(args), timeout)
        texts = [path.read_text() for path in place.outputs[:2]]
    return subprocess.CompletedProcess(args, status, *texts)


@dataclass
class _Place:
    """Where a program runs."""

    folder: Path
    environment: dict[str, str]
    #: Files of what it writes to its standard streams, and of the program that it becomes.
    outputs: tuple[Path, Path, Path] = (Path(), Path(), Path())


def _status_of(context: Any, fn: Callable[..., None], args: Any, timeout: float) -> int | None:
    """The exit status of a process that calls ``fn(*args)``; None: it took too long."""
    process = context.Process(target=fn, args=args)
    process.start()
    process.join(timeout)
    status: int | None = process.exitcode
    if status is None:
        process.kill()
        process.join()
    process.close()
    return status


@functools.cache
def _wait_for_server() -> None:
    """Wait until the server has loaded the modules, whose time counts for no program."""
    process = CONTEXT.Process(target=gc.collect)
    process.start()
    process.join()


class _Server:
    """A process that has some more modules loaded, and is forked for each program."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        CONTEXT.Process(target=_serve, args=(theirs, modules)).start()
        theirs.close()
        # Before the processes that still run are waited for: the server ends then.
        multiprocessing.util.Finalize(self, self._pipe.close, exitpriority=0)

    def call(self, *request: Any) -> int | None:
        """As :func:`_status_of`."""
        self._pipe.send(request)
        status: int | None = self._pipe.recv()
        return status


_server = functools.cache(_Server)


def _serve(pipe: Connection, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # as tests/frozen.py
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(_status_of(FORK, *request))


def _become(fn: Callable[..., object], args: tuple[Any, ...], place: _Place) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in enumerate(place.outputs[:2], 1):
        os.dup2(os.open(path, flags), number)
    os.chdir(place.folder)
    os.environ.clear()
    os.environ.update(place.environment)
    vars(os)["execv"] = functools.partial(_become_another, place.outputs[2])
    try:
        fn(*args)
    finally:
        atexit._run_exitfuncs()


def _run(*command: str) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _become_another(note: Path, path: str, arguments: Sequence[str]) -> None:
    """End this process; the program that it was to become, another of Python's, runs next."""
    assert path == sys.executable, path
    note.write_text(json.dumps(arguments[1:]))
    os._exit(0)
