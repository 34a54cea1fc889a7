"""Equal lines of ranks become one; pure, with time given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilework.launch.output_lines import WAIT_SECONDS, LineMerger

WARNING = "train.py:4: UserWarning: slow\n"
SOURCE = "  warnings.warn(...)\n"


class Ranks:
    def __init__(self, count: int) -> None:
        self.merger = LineMerger(count)
        self.out = b""

    def write(self, rank: int, *lines: str, now: float = 0.0) -> None:
        prefix = f"[{rank}] ".encode()
        data = b"".join(prefix + line.encode() for line in lines)
        self.out += self.merger.feed(rank, prefix, data, now)

    def shown(self) -> list[str]:
        return (self.out + self.merger.flush()).decode().splitlines()


def test_equal_lines_are_one_and_others_stay() -> None:
    ranks = Ranks(4)
    for rank in (2, 0, 1):
        ranks.write(rank, "loading\n", f"rank {rank}\n")
    assert ranks.shown() == ["[0-2] loading", "[2] rank 2", "[0] rank 0", "[1] rank 1"]


def test_a_line_waits_only_a_moment() -> None:
    ranks = Ranks(2)
    ranks.write(0, "a\n")
    assert ranks.merger.take(WAIT_SECONDS / 2) == b""
    assert ranks.merger.take(WAIT_SECONDS) == b"[0] a\n"
    assert ranks.merger.due is None


def test_a_line_that_all_have_written_waits_no_longer() -> None:
    ranks = Ranks(2)
    ranks.write(0, "a\n")
    ranks.write(1, "a\n")
    assert ranks.out == b"[0-1] a\n"


def test_a_warning_is_shown_once_for_the_job() -> None:
    ranks = Ranks(3)
    ranks.write(1, WARNING, SOURCE, "b\n")
    for rank in (0, 2):
        ranks.out += ranks.merger.take(10.0 + rank)
        ranks.write(rank, WARNING, SOURCE, f"rank {rank}\n", now=10.0 + rank)
    assert ranks.shown() == [
        "[1] train.py:4: UserWarning: slow",
        "[1]   warnings.warn(...)",
        "[1] b",
        "[0] rank 0",
        "[2] rank 2",
    ]


def test_a_warning_that_one_rank_repeats_is_shown_each_time() -> None:
    ranks = Ranks(2)
    ranks.write(0, WARNING, WARNING)
    assert len(ranks.shown()) == 2


def test_much_output_passes_as_it_is() -> None:
    ranks = Ranks(2)
    lines = ["x\n"] * 1000
    ranks.write(0, *lines)
    ranks.write(1, *lines)
    assert ranks.shown() == ["[0] x"] * 1000 + ["[1] x"] * 1000


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=40))
def test_each_ranks_lines_keep_their_order(written: list[tuple[int, str]]) -> None:
    ranks = Ranks(3)
    for at, (rank, text) in enumerate(written):
        ranks.write(rank, f"{text}\n", now=at * WAIT_SECONDS / 3)
    shown: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for line in ranks.shown():
        who, text = line[1:].split("] ")
        for part in who.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                shown[rank].append(text)
    assert shown == {r: [text for rank, text in written if rank == r] for r in shown}
