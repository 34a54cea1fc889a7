"""Stands in for torch where a test is about processes: a launcher that loads it in no time."""

THREADS = [1]


def set_num_threads(threads: int) -> None:
    THREADS[0] = threads


def get_num_threads() -> int:
    return THREADS[0]
