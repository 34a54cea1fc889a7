"""Programs in processes that have loaded torch and nothing of tilework."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import threading

#: Reads one program per line, runs the program in a fork, and writes a line: exit status, output.
_SERVER = """
import sys, torch
import json, os, tempfile, traceback
for line in sys.stdin:
    with tempfile.TemporaryFile() as out:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            status = 1
            try:
                exec(compile(json.loads(line), "<program>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        status = os.waitpid(pid, 0)[1]
        out.seek(0)
        print(json.dumps([status, out.read().decode()]), flush=True)
"""


def run_on_torch(program: str, timeout: float = 120) -> str:
    """What a program prints; it must end without an error."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(program) + "\n")
    server.stdin.flush()
    limit = threading.Timer(timeout, server.kill)
    limit.start()
    try:
        status, out = json.loads(server.stdout.readline())
    finally:
        limit.cancel()
    assert status == 0, out
    text: str = out
    return text


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # it ends with its input
    return server
