"""Print a line for each program, and a summary: ``python -m tests.capture.ordinary``."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter

import torch

from tests.capture.ordinary import PROGRAMS, outcome


def main() -> int:
    """Run what the command line says; the status is 1 if any program is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.capture.ordinary", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="names, or patterns of names")
    parser.add_argument("--backend", default="python", choices=["python", "inductor", "plain"])
    parser.add_argument("--width", type=int, default=160, help="of the texts, in characters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    amiss = 0
    for name, program in PROGRAMS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.names):
            continue
        found = outcome(name, options.backend)
        expected = "refused" if program.refused else "equal"
        counts[found.kind] += 1
        amiss += found.kind != expected
        note = "" if found.kind == expected else f"  (expected: {expected})"
        print(f"{found.kind:8}{name:40}{found.seconds:6.2f} s  records {found.records}{note}")
        if found.text:
            print(f"        {' '.join(found.text.split())[: options.width]}", flush=True)
    print(f"{dict(counts)}; not as expected: {amiss}")
    return int(amiss > 0)


if __name__ == "__main__":
    raise SystemExit(main())
