"""``make fuzz-programs``: random programs on DTensors against plain tensors, from numbers on.

    python -m tests.fuzz                              # 2,000 programs, from a number of the day
    python -m tests.fuzz --first 0 --programs 20000   # those of the numbers 0 to 19999
    python -m tests.fuzz --seed 1234                  # the program of one number, minimised
    python -m tests.fuzz --run 'v0 = leaf("v0", (4, 4), 0, "S0")' 'v0.sin()' --mesh 2

Prints each program that goes wrong, minimised, as Python that runs, with what plain tensors give.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.fuzz.minimise import minimise
from tests.fuzz.programs import MESHES, Outcome, Program, expect, made, run_programs

#: Programs that run in one group of ranks.
_BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, help="the number of the first; default: the time")
    parser.add_argument("--seed", type=int, help="only the program of this number")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--most", type=int, default=10, help="stop after so many that go wrong")
    parser.add_argument("--run", nargs="+", metavar="STATEMENT", help="run this program instead")
    parser.add_argument("--mesh", type=int, nargs="+", default=[2], help="its mesh")
    parser.add_argument("--quick", action="store_true", help="minimise nothing")
    options = parser.parse_args()
    if options.run is not None:
        return _report([Program(options.run, tuple(options.mesh))])
    if options.seed is not None:
        return _report([made(options.seed)], minimised=not options.quick)
    first = int(time.time()) if options.first is None else options.first
    return _search(first, options)


def _report(programs: Sequence[Program], minimised: bool = False) -> int:
    for program in programs:
        print(program)
        if not expect(program):
            print("torch refuses it")
            return 2
        outcome = next(iter(run_programs([program])))
        if outcome.kind not in ("right", "refused") and minimised:
            outcome = minimise(outcome)
        show(outcome)
    return 0


def _search(first: int, options: argparse.Namespace) -> int:
    started, counts, shown = time.time(), Counter[str](), 0
    for start in range(first, first + options.programs, _BATCH * len(MESHES)):
        stop = min(start + _BATCH * len(MESHES), first + options.programs)
        for place in range(len(MESHES)):
            numbers = [n for n in range(start, stop) if n % len(MESHES) == place]
            programs = [program for n in numbers if expect(program := made(n))]
            for outcome in run_programs(programs):
                counts[outcome.kind] += 1
                counts["with gradients"] += outcome.program.graded
                if outcome.kind not in ("right", "refused") and shown < options.most:
                    shown += 1
                    show(outcome if options.quick else minimise(outcome))
        if time.time() - started > options.seconds or shown >= options.most:
            break
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"numbers {first} to {stop - 1}: {text}; {time.time() - started:.0f} s")
    return int(any(counts[kind] for kind in ("wrong", "raised", "hang")))


def show(outcome: Outcome) -> None:
    """Print a program as Python that runs, and what became of it."""
    program = outcome.program
    print(f"# {outcome.kind}: number {program.seed}, mesh {program.mesh}")
    print("from tests.fuzz.programs import compare\n")
    print('compare("""')
    print(program)
    print(f'""", mesh={program.mesh})')
    for line in f"{outcome.why}".splitlines():
        print(f"# {line}")
    print("# plain tensors give")
    for name, value in program.expected.items():
        if "." not in name or ".grad" in name or "gradient" in name:
            print(f"#   {name} = {str(value).replace(chr(10), '')}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
