from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tilework

SOURCES = Path(tilework.__file__ or "").parent.parent
STUB = Path(__file__).parent / "stub"


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """What ranks printed, in an order that does not depend on who was first."""
        return sorted(self.out.splitlines())


class Launch:
    """Starts ``tilework run`` in a folder of its own; ends what a test leaves running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": f"{STUB}{os.pathsep}{SOURCES}"}
        for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR"):
            self.environment.pop(name, None)
        self.environment["TILEWORK_FLIGHT_DIR"] = str(folder / "flight")
        self._started: list[subprocess.Popen[bytes]] = []

    def with_torch(self) -> None:
        """Let the launcher load the real torch."""
        self.environment["PYTHONPATH"] = str(SOURCES)

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def start(self, *arguments: str, **kwargs: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tilework.cli", "run", *arguments]
        options: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        started: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            command, cwd=self.folder, env=self.environment, **{**options, **kwargs}
        )
        self._started.append(started)
        return started

    def __call__(self, text: str, *options: str, arguments: Sequence[str] = ()) -> Finished:
        """Run a script with two ranks, unless ``options`` say otherwise, to its end."""
        count = () if "-n" in options else ("-n", "2")
        return self.finish(self.start(*count, *options, self.script(text), *arguments))

    def finish(self, process: subprocess.Popen[bytes]) -> Finished:
        began = time.monotonic()
        out, err = process.communicate(timeout=240)
        seconds = time.monotonic() - began
        # A stream that went elsewhere is None.
        texts = [(data or b"").decode(errors="surrogateescape") for data in (out, err)]
        return Finished(process.returncode, texts[0], texts[1], seconds)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(40)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


@pytest.fixture(params=["fork", "spawn"])
def start(request: pytest.FixtureRequest) -> str:
    method: str = request.param
    return method


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(of: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(of):
                found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_for_files(folder: Path, pattern: str, count: int, seconds: float = 120.0) -> list[str]:
    """The contents of ``count`` files that ranks write, once they are all there and not empty."""

    def contents() -> list[str]:
        return [text for path in sorted(folder.glob(pattern)) if (text := path.read_text())]

    assert wait_until(lambda: len(contents()) == count, seconds), f"got {contents()}"
    return contents()
