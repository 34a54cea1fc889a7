"""Operations that move data, over ranks, even and uneven sizes, and several rounds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.csrc.core_ranks import SLOT_BYTES, Rank, run_threads
from tests.tables import each, pairs
from tilework import _core

SIZES = [1, 2, 3, 5]
#: Bytes per piece: none, one, a slot, several rounds with an uneven end.
PIECES = [0, 1, SLOT_BYTES, 3 * SLOT_BYTES + 5]


def piece(sender: int, receiver: int, nbytes: int) -> Tensor:
    """Bytes that tell who sent them to whom, and where each belongs."""
    return ((torch.arange(nbytes) * 7 + sender * 31 + receiver * 101) % 251).to(torch.uint8)


def blank(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 255, dtype=torch.uint8)


@each("size", SIZES)
@each("nbytes", PIECES)
def test_broadcast(size: int, nbytes: int) -> None:
    root = size // 2

    def program(rank: Rank) -> Tensor:
        tensor = piece(root, 0, nbytes) if rank.rank == root else blank(nbytes)
        rank.run("broadcast", [], [tensor], root=root)
        return tensor

    for result in run_threads(size, program):
        assert torch.equal(result, piece(root, 0, nbytes))


def gathered(rank: Rank, kind: str, sizes: list[int], root: int = 0) -> list[Tensor]:
    """all_gather or gather of ``sizes[r]`` bytes from each rank r."""
    receives = kind == "all_gather" or rank.rank == root
    outputs = [blank(n) for n in sizes] if receives else []
    rank.run(kind, [piece(rank.rank, 0, sizes[rank.rank])], outputs, root=root)
    return outputs


@pairs(size=SIZES, nbytes=PIECES, uneven=[False, True])
def test_all_gather(size: int, nbytes: int, uneven: bool) -> None:
    sizes = [nbytes * (rank if uneven else 1) for rank in range(size)]
    for result in run_threads(size, lambda rank: gathered(rank, "all_gather", sizes)):
        assert torch.equal(
            torch.cat(result), torch.cat([piece(r, 0, n) for r, n in enumerate(sizes)])
        )


@each("size", SIZES)
@each("uneven", [False, True])
def test_gather(size: int, uneven: bool) -> None:
    sizes = [5000 * (rank if uneven else 1) for rank in range(size)]
    root = size - 1
    results = run_threads(size, lambda rank: gathered(rank, "gather", sizes, root))
    assert torch.equal(
        torch.cat(results[root]), torch.cat([piece(r, 0, n) for r, n in enumerate(sizes)])
    )


@each("size", SIZES)
@each("uneven", [False, True])
def test_scatter(size: int, uneven: bool) -> None:
    sizes = [5000 * (rank if uneven else 1) for rank in range(size)]
    root = size - 1

    def program(rank: Rank) -> Tensor:
        parts = [piece(root, to, n) for to, n in enumerate(sizes)] if rank.rank == root else []
        output = blank(sizes[rank.rank])
        rank.run("scatter", parts, [output], root=root)
        return output

    for rank, result in enumerate(run_threads(size, program)):
        assert torch.equal(result, piece(root, rank, sizes[rank]))


@each("size", SIZES)
@each("seed", range(4))
def test_all_to_all_with_any_sizes(size: int, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [[draw.choice([0, 1, 100, 9000]) for _ in range(size)] for _ in range(size)]

    def program(rank: Rank) -> list[Tensor]:
        me = rank.rank
        outputs = [blank(sizes[sender][me]) for sender in range(size)]
        rank.run("all_to_all", [piece(me, to, sizes[me][to]) for to in range(size)], outputs)
        return outputs

    for rank, result in enumerate(run_threads(size, program)):
        for sender in range(size):
            assert torch.equal(result[sender], piece(sender, rank, sizes[sender][rank]))


@each("size", [2, 3, 4])
@each("seed", range(4))
def test_rounds_at_all_places_of_an_outbox(size: int, seed: int) -> None:
    """From 8 KiB on, data lies elsewhere in its outbox each time; ranks send unequal lengths."""
    slot_bytes = 128 * 1024
    never = dict.fromkeys(["thread_copy_bytes", "slow_outbox_ns"], _core.NEVER_BYTES)
    tunables = never | {"one_shot_bytes": 48 * 1024, "chunk_bytes": 96 * 1024}
    lengths = [0, 8191, 8192, 9001, 30000, 65536, 200_000]

    def program(rank: Rank) -> None:
        draw, me = random.Random(seed), rank.rank
        for _ in range(12):
            sizes = [[draw.choice(lengths) for _ in range(size)] for _ in range(size)]
            for to, result in enumerate(gathered(rank, "all_gather", sizes[0])):
                assert torch.equal(result, piece(to, 0, sizes[0][to]))
            outputs = [blank(sizes[sender][me]) for sender in range(size)]
            rank.run("all_to_all", [piece(me, to, sizes[me][to]) for to in range(size)], outputs)
            for sender, result in enumerate(outputs):
                assert torch.equal(result, piece(sender, me, sizes[sender][me]))
            total = torch.full((sizes[0][0] // 4,), float(me))
            rank.run("all_reduce", [total], [total], op="sum")
            assert bool((total == sum(range(size))).all())
            part = torch.zeros(sizes[0][1] // 4)
            inputs = [torch.full_like(part, float(to)) for to in range(size)]
            rank.run("reduce_scatter", inputs, [part], op="sum")
            assert bool((part == size * me).all())

    assert run_threads(size, program, slot_bytes, tunables) == [None] * size


def test_all_gather_in_place() -> None:
    def program(rank: Rank) -> Tensor:
        flat = torch.full((3, 5000), float(rank.rank))
        rank.run("all_gather", [flat[rank.rank]], list(flat))
        return flat[:, 0]

    for result in run_threads(3, program):
        assert result.tolist() == [0.0, 1.0, 2.0]


def test_all_to_all_in_place() -> None:
    def program(rank: Rank) -> Tensor:
        flat = torch.full((3, 5000), float(rank.rank))
        rank.run("all_to_all", list(flat), list(flat))
        return flat[:, -1]

    for result in run_threads(3, program):
        assert result.tolist() == [0.0, 1.0, 2.0]


def test_64_ranks() -> None:
    def program(rank: Rank) -> Any:
        outputs = [blank(100) for _ in range(64)]
        rank.run("all_gather", [piece(rank.rank, 0, 100)], outputs)
        rank.run("all_to_all", outputs, (received := [blank(100) for _ in range(64)]))
        total = torch.full((20_000,), float(rank.rank))
        rank.run("all_reduce", [total], [total], op="sum")
        same = all(torch.equal(t, piece(rank.rank, 0, 100)) for t in received)
        return same, total[0].item(), total[-1].item()

    assert run_threads(64, program) == [(True, 2016.0, 2016.0)] * 64


def test_many_operations_share_the_slots_safely() -> None:
    def program(rank: Rank) -> float:
        draw, total = random.Random(5), 0.0  # the same choices on every rank
        for number in range(300):
            tensor = torch.full((draw.choice([1, 1000, 3000]),), float(number + rank.rank))
            root = draw.randrange(3)
            if draw.random() < 0.5:
                rank.run("all_reduce", [tensor], [tensor], op="sum")
                assert (tensor == 3 * number + 3).all()
            else:
                rank.run("broadcast", [], [tensor], root=root)
                assert (tensor == number + root).all()
            total += tensor[-1].item()
        return total

    assert len(set(run_threads(3, program))) == 1


@each(
    ("kind", "inputs", "outputs"),
    [
        ("all_gather", 1, 1),
        ("all_to_all", 2, 1),
        ("broadcast", 1, 1),
        ("barrier", 0, 1),
        ("reduce_scatter", 1, 1),
        ("scatter", 1, 1),
    ],
)
def test_the_wrong_number_of_buffers_is_refused(kind: str, inputs: int, outputs: int) -> None:
    op = "sum" if kind == "reduce_scatter" else "none"
    with pytest.raises(ValueError, match="expected on this rank"):
        run_threads(
            2, lambda rank: rank.run(kind, [blank(8)] * inputs, [blank(8)] * outputs, op=op)
        )


def test_buffers_that_overlap_in_part_are_refused() -> None:
    memory = torch.zeros(100)
    with pytest.raises(ValueError, match="overlap"):
        run_threads(1, lambda rank: rank.run("all_reduce", [memory[:50]], [memory[1:51]], op="sum"))


def test_a_foreign_root_is_refused() -> None:
    with pytest.raises(ValueError, match="root 2 is not a rank of this group of 2"):
        run_threads(2, lambda rank: rank.run("broadcast", [], [blank(1)], root=2))


def test_statistics_count() -> None:
    def program(rank: Rank) -> dict[str, int]:
        rank.run("all_gather", [blank(100)], [blank(100), blank(100)])
        rank.run("barrier")
        return rank.group.statistics()

    for figures in run_threads(2, program):
        assert (figures["operations"], figures["bytes"]) == (2, 100)
        assert figures["segment_bytes"] == _core.segment_bytes(2, SLOT_BYTES)
