"""Python programs that start at once, with torch loaded: forked from the server of jobs.py.

As ``python …`` otherwise: a process, working folder, environment and arguments of its own, whose
output and exit status are returned.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.jobs import CONTEXT


def run_warm(
    *command: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> subprocess.CompletedProcess[str]:
    """What became of ``python *command``; the command is a script, or -m and a module."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "out"), Path(folder, "err")
        process = CONTEXT.Process(
            target=_become, args=(command, cwd or Path.cwd(), dict(env or os.environ), *outputs)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        status = process.exitcode
        process.close()
        texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess(command, status, *texts)


def _become(command: tuple[str, ...], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in enumerate((out, err), 1):
        os.dup2(os.open(path, flags), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path.insert(0, os.fspath(cwd))
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
