"""Plans run by ranks that are processes: on shared memory, and on torch's engines."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.comm.transfer.reference import same
from tilework.comm.backend import is_backend_available
from tilework.comm.transfer import BUFFER_BYTES, run_plan
from tilework.layout import Partial, Placement, Replicate, Shard, Tiling, mesh_tiling, plan
from tilework.testing import run_ranks
from tilework.testing.groups.values import pattern

LIMIT = timedelta(seconds=120)
SHAPE = (37, 41)
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Shard(0, (30, 0, 7)), Replicate(), Partial()]
MIB = 1 << 20


def check(source: Tiling, target: Tiling, rank: int, dtype: torch.dtype, buffer: int) -> None:
    """Numbers are small and whole: sums of three are exact in 16 bits."""
    terms = [pattern(term, SHAPE, dtype) for term in range(len(source.terms))]
    tiles = [terms[source.term_of(i)][source.tiles[i].box.slices] for i in source.of(rank)]
    results = run_plan(plan(source, target, rank), tiles, dtype=dtype, buffer_bytes=buffer)
    total = sum(terms[1:], terms[0])
    for i, result in zip(target.of(rank), results, strict=True):
        expected = total
        if len(target.terms) > 1:
            term = target.term_of(i)
            alone = total if term == 0 else torch.zeros_like(total)
            expected = terms[term] if len(terms) > 1 else alone
        assert same(result, expected[target.tiles[i].box.slices])


@pytest.mark.parametrize("backend", ["shm", "gloo", "hybrid"])
def test_values(backend: str) -> None:
    if not is_backend_available(backend):
        pytest.skip(f"this installation has no {backend}")

    def program(rank: int) -> None:
        layouts = [mesh_tiling(SHAPE, [0, 1, 2], [placement]) for placement in PLACEMENTS]
        for source in layouts:
            for target in layouts:
                for dtype in (torch.float32, torch.bfloat16):
                    check(source, target, rank, dtype, buffer=2000)
                check(source, target, rank, torch.float64, buffer=MIB)

    run_ranks(3, program, kind="processes", backend=backend, timeout=LIMIT)


def test_a_reshard_grows_a_process_by_its_results_and_the_buffer() -> None:
    side = 4096
    rows, columns = (mesh_tiling((side, side), [0, 1], [Shard(dim)]) for dim in (0, 1))

    def resident(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def program(rank: int) -> int:
        (tile,) = (torch.ones(box.sizes) for box in rows.boxes_of(rank))
        out = [torch.zeros(box.sizes) for box in columns.boxes_of(rank)]
        run_plan(plan(rows, columns, rank), [tile], out=out)  # what stays: outboxes, code
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        run_plan(plan(rows, columns, rank), [tile], out=out)
        assert out[0].sum() == out[0].numel()
        return resident("VmHWM") - before

    assert max(run_ranks(2, program, kind="processes")) < BUFFER_BYTES + MIB
