"""Random lives of models on ranks, beside the plain model's.

    python -m tests.parallel.lives                            # 500 lives, from a number of the day
    python -m tests.parallel.lives --first 0 --lives 5000     # those of the numbers 0 to 4999
    python -m tests.parallel.lives --seed 123                 # the life of one number, minimised
    python -m tests.parallel.lives --way blocks --act replace # only lives with these

Prints each life that goes wrong, minimised, as Python that runs, then how often each act was done
and each way of wrapping lived in.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch

from tests.parallel.lives.drawing import ACTS, Life, drawn
from tests.parallel.lives.living import Outcome, run_lives
from tests.parallel.lives.minimise import minimise
from tests.parallel.lives.ways import WAYS

#: Lives in one group of ranks.
_BATCH = 50
#: Every so many lives, ranks do not do the same.
_UNLIKE = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lives", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, help="the number of the first; default: the time")
    parser.add_argument("--seed", type=int, help="only the life of this number")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--most", type=int, default=10, help="print so many that go wrong")
    parser.add_argument("--way", nargs="+", choices=tuple(WAYS), help="only these ways")
    parser.add_argument("--act", choices=tuple(ACTS), help="only lives with this act")
    parser.add_argument("--quick", action="store_true", help="minimise nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.seed is not None:
        outcome = next(run_lives([life_of(options.seed)]))
        show(outcome if options.quick or outcome.kind == "right" else minimise(outcome))
        return int(outcome.kind == "wrong")
    first = int(time.time()) if options.first is None else options.first
    return _search(first, options)


def life_of(number: int) -> Life:
    return drawn(number, number % _UNLIKE == _UNLIKE - 1)


def _search(first: int, options: argparse.Namespace) -> int:
    started, counts, shown = time.time(), Counter[str](), 0
    size = _BATCH * 3
    for start in range(first, first + options.lives, size):
        lives = [life_of(n) for n in range(start, min(start + size, first + options.lives))]
        lives = [life for life in lives if _is_wanted(life, options)]
        for ranks in (2, 3, 4):
            for outcome in run_lives([life for life in lives if life.ranks == ranks]):
                _count(counts, outcome)
                if outcome.kind == "wrong" and shown < options.most:
                    shown += 1
                    show(outcome if options.quick else minimise(outcome))
        if time.time() - started > options.seconds:
            break
    _print_totals(counts, first, start + len(lives) - 1, time.time() - started)
    return int(counts["wrong"] > 0)


def _is_wanted(life: Life, options: argparse.Namespace) -> bool:
    if options.way and life.way not in options.way:
        return False
    return options.act is None or any(a.startswith(f"{options.act}(") for a in life.acts)


def _count(counts: Counter[str], outcome: Outcome) -> None:
    counts[outcome.kind] += 1
    counts[f"way {outcome.life.way}"] += 1
    counts["in which ranks are not alike"] += outcome.life.unlike is not None
    counts.update(f"act {name}" for name in outcome.done)
    if outcome.kind == "refused":
        counts.update([f"refused: {outcome.why}"])


def _print_totals(counts: Counter[str], first: int, last: int, seconds: float) -> None:
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "wrong"))
    print(f"numbers {first} to {last}: {kinds}; {seconds:.0f} s")
    print(f"{counts['in which ranks are not alike']} in which ranks are not alike")
    print(_line("ways", counts, [f"way {name}" for name in WAYS]))
    print(_line("acts", counts, [f"act {name}" for name in ACTS]))
    for name in sorted(name for name in counts if name.startswith("refused: ")):
        print(f"{name}: {counts[name]}")


def _line(title: str, counts: Counter[str], names: Iterable[str]) -> str:
    return f"{title}: " + ", ".join(f"{n.split(' ', 1)[1]} {counts[n]}" for n in names)


def show(outcome: Outcome) -> None:
    """Print a life as Python that runs, and what became of it."""
    print(f"# {outcome.kind}: number {outcome.life.seed}")
    print("from tests.parallel.lives.living import live\n")
    print(outcome.life)
    for line in outcome.why.splitlines():
        print(f"# {line}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
