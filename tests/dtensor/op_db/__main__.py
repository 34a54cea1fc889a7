"""All of torch's database of operators, on DTensors, in processes of their own.

An operator that hangs or crashes stops no other. Prints what is wrong, and how many are right.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.dtensor.op_db import table

_SECONDS = 120


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor.op_db", description=__doc__)
    parser.add_argument("operators", nargs="*", default=["*"], help="names, or patterns of names")
    parser.add_argument("--dtypes", default="float64", help="separated by commas")
    parser.add_argument("--samples", type=int, default=6, help="of each operator and dtype")
    parser.add_argument("--seed", type=int, default=0, help="for layouts")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--results", default="database.jsonl", help="a file for what is found")
    parser.add_argument("--table", action="store_true", help="write docs/operators.md (of all)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(options)
    return _supervise(options)


# -- a process that runs some operators ------------------------------------------------------


def _work(options: Any) -> int:
    from tests.dtensor.op_db.calls import cases, dtypes_of, named, operators
    from tests.dtensor.op_db.running import moves_a_dim_whole, run_cases

    wanted = [getattr(torch, name) for name in options.dtypes.split(",")]
    names = set(json.loads(Path(options.worker).read_text()))
    torch.set_num_threads(1)
    for info in operators():
        if named(info) not in names:
            continue
        _tell({"operator": named(info), "state": "begins"})
        by_mesh = defaultdict(list)
        for dtype in dtypes_of(info, wanted):
            for case in cases(info, dtype, options.samples, seed=options.seed):
                by_mesh[case.mesh].append(case)
        for its in by_mesh.values():
            for result in run_cases(its):
                _tell({
                    "operator": named(info),
                    "state": result.outcome,
                    "text": str(result) if result.outcome != "right" else "",
                    "gathered": sorted(set(result.gathered)),
                    "form": result.case.form,
                    "why": result.why,
                })  # fmt: skip
        dtype = next(iter(dtypes_of(info, wanted)), torch.float64)
        whole = moves_a_dim_whole(info, dtype, options.samples)
        _tell({"operator": named(info), "state": "ends", "whole": whole})
    return 0


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# -- the one that watches --------------------------------------------------------------------


class _Worker:
    """A process and the operators that it has still to run."""

    def __init__(self, options: Any, names: list[str], number: int) -> None:
        self.options, self.names, self.number = options, names, number
        self.file = Path(f"{options.results}.{number}")
        self.process: subprocess.Popen[bytes] | None = None
        self.found: list[dict[str, Any]] = []
        #: For operators, whether calls move a sharded dim whole.
        self.whole: dict[str, list[bool]] = {}

    def start(self) -> None:
        """Begin with the first of its operators."""
        todo = Path(f"{self.file}.todo")
        todo.write_text(json.dumps(self.names))
        options = self.options
        command = [sys.executable, "-m", "tests.dtensor.op_db", "--worker", str(todo)]
        command += ["--dtypes", options.dtypes, "--samples", str(options.samples)]
        command += ["--seed", str(options.seed)]
        with self.file.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        self.since, self.size = time.monotonic(), 0

    def look(self) -> bool:
        """Whether it has something to do; an operator that takes too long is given up."""
        if self.process is None:
            if not self.names:
                return False
            self.start()
            return True
        ended = self.process.poll() is not None
        size = self.file.stat().st_size
        if size != self.size:
            self.since, self.size = time.monotonic(), size
        late = time.monotonic() - self.since > _SECONDS
        if not ended and not late:
            return True
        if late:
            self.process.kill()
            self.process.wait()
        self.process = None
        lines = [json.loads(line) for line in self.file.read_text().splitlines() if line[:1] == "{"]
        self.found += [one for one in lines if one["state"] not in ("begins", "ends")]
        self.whole |= {one["operator"]: one["whole"] for one in lines if one.get("whole")}
        over = {one["operator"] for one in lines if one["state"] == "ends"}
        begun = [one["operator"] for one in lines if one["state"] == "begins"]
        self.names = [name for name in self.names if name not in over]
        if self.names and (begun or late):
            stuck = begun[-1] if begun and begun[-1] in self.names else self.names[0]
            self.names.remove(stuck)
            why = "hangs" if late else "crashes"
            self.found.append({"operator": stuck, "state": why, "text": f"{stuck}: {why}"})
        elif self.names and not begun:
            self.names = []
        return bool(self.names)


def _supervise(options: Any) -> int:
    from tests.dtensor.op_db.calls import named, operators

    every = [named(info) for info in operators()]
    chosen = [n for n in every if any(fnmatch.fnmatch(n, p) for p in options.operators)]
    workers = [_Worker(options, chosen[i :: options.jobs], i) for i in range(options.jobs)]
    while sum(worker.look() for worker in workers):
        time.sleep(0.2)
    found = [one for worker in workers for one in worker.found]
    Path(options.results).write_text("".join(json.dumps(one) + "\n" for one in found))
    if options.table:
        table.write(every, found, dict(item for worker in workers for item in worker.whole.items()))
    bad = [one for one in found if one["state"] not in ("right", "refused")]
    for one in bad:
        print(one["text"])
    counts = Counter(one["state"] for one in found)
    operators_bad = {one["operator"] for one in bad}
    print(
        f"{len(chosen)} operators, {len(found)} calls: "
        f"{', '.join(f'{count} {state}' for state, count in counts.items())}; "
        f"{len(operators_bad)} operators with something wrong"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
