"""An abort record that holds garbage is still an abort."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join, leave
from tilework.errors import DistBackendError

REASON = "the reason that was given"


def first_pages() -> set[int]:
    """Where the segments of this process's groups begin."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split("-")[0], 16) for line in mapped if "memfd:tilework" in line}


def garble(pages: set[int], rank: int, kind: bytes, text: bytes) -> None:
    """Write over what follows the abort record's state: rank, kind, length, text."""
    descriptor = os.open("/proc/self/mem", os.O_RDWR)
    for start in pages:
        found = os.pread(descriptor, 4096, start).find(b"peer_lost")
        assert found > 0
        record = struct.pack("=i32sI", rank, kind, len(text)) + text
        os.pwrite(descriptor, record, start + found - 4)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("rank", "kind", "text"),
    [
        (7, b"timeout", b"1;why"),
        (-5, b"timeout", b"1;why"),
        (0, b"\xff\xfe", b"1;why"),
        (0, b"timeout", b"\xff\xfe;why"),
        (0, b"timeout", b"a,b;why"),
        (0, b"timeout", b"9" * 1900),
        (1, b"mismatch", b""),
    ],
)
def test_a_garbled_abort_is_an_error_of_ours(
    rank: int, kind: bytes, text: bytes, tmp_path: Path
) -> None:
    def story(me: int, say: Say) -> None:
        of_earlier_tests = first_pages()
        store = join(me, 2, tmp_path / "store")
        if me == 1:
            dist.abort_process_group(reason=REASON)
            garble(first_pages() - of_earlier_tests, rank, kind, text)
            store.set("garbled", "")
        store.wait(["garbled"])
        with pytest.raises(DistBackendError, match="aborted"):
            dist.all_reduce(torch.ones(3))
        say("heard")
        leave(store)

    with ForkedRanks(2, story) as ranks:
        assert [one.hear() for one in ranks] == ["heard", "heard"]
