"""Parts that the examples share: flags, starting the ranks, files to read, a live display."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

#: Not Python that people write: other packages, tests, long tables.
STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        super().error(message)


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` on that fit into 63 bits, as seeds must."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) < 1 << 63:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return int(text)

    return parse


def whole_numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, with commas between them."""
    return [whole_number(1)(part) for part in text.split(",")]


def launched_ranks() -> int | None:
    """The number of ranks that a launcher has started; None without a launcher."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size else None


def ranks_asked(parser: Parser, asked: int | None) -> int | None:
    """The number of ranks by ``--ranks`` or a launcher, None by neither; ends where they differ."""
    launched = launched_ranks()
    if launched is not None and asked not in (None, launched):
        parser.error(
            f"--ranks {asked}, but the launcher started {launched}: "
            "leave --ranks out, or tell the launcher"
        )
    return asked or launched


def launch_myself(ranks: int, options: Sequence[str] = ()) -> NoReturn:
    """Become ``tilework run``, which starts this script again, once for each rank."""
    # Rank 0 alone prints here, so its lines need no "[0]" in front.
    run = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", str(ranks), *options]
    os.execv(sys.executable, [sys.executable, *run, *sys.argv])


def stdlib_files() -> list[Path]:
    """The standard library's sources, in the same order everywhere."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.rglob("*.py"))
    return [f for f in files if not STDLIB_SKIPPED.intersection(f.relative_to(folder).parts)]


class Display:
    """A live bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(
        self, title: str, steps: int, unit: str, per_step: int, shown: bool = True
    ) -> None:
        """``per_step`` units (words, tokens) are trained on in each step."""
        self.title, self.steps, self.shown = title, steps, shown
        self.unit, self.per_step = unit, per_step
        self.begun = self.printed = time.perf_counter()
        self.bar: Progress | None = None

    def __enter__(self) -> Display:
        if self.shown and Console().is_terminal:
            columns = BarColumn(), TextColumn("{task.completed}/{task.total}  {task.fields[text]}")
            self.bar = Progress(TextColumn("{task.description}"), *columns, TimeRemainingColumn())
            self.bar.add_task(self.title, total=self.steps, text="")
            self.bar.start()
        return self

    def update(self, step: int, loss: float) -> None:
        """Tell of a step, counted from 1."""
        if not self.shown:
            return
        now = time.perf_counter()
        speed = step * self.per_step / max(now - self.begun, 1e-9)
        text = f"loss {loss:.3f}  {speed:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, text=text)
        elif step in (1, self.steps) or now - self.printed >= 5:
            self.printed = now
            print(f"{self.title} {step}/{self.steps}  {text}", flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
