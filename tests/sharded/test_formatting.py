"""What is told of sharded tensors: in one line, in text, in colours."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    show,
    zeros,
)
from tilework.sharded.metadata import Items
from tilework.testing import run_ranks

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def places(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def rows(*lengths: int, width: int = 4) -> EnumerableShardingSpec:
    """One shard of so many rows for each rank."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return EnumerableShardingSpec(
        ShardMetadata([start, 0], [length, width], f"rank:{rank}/cpu")
        for rank, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )


def on_rank_0(ranks: int, fn: Callable[[], Any]) -> Any:
    """What rank 0 gets; the others do nothing, so it hangs if anything is communicated."""
    return run_ranks(ranks, lambda rank: fn() if rank == 0 else None)[0]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output counts as a terminal, without colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Prints a tensor or spec, and gives the lines."""

    def print_it(tensor: Any, columns: int = 80, size: Any = None, **dtype: Any) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        show(tensor, size=size, **dtype)
        return capsys.readouterr().out.splitlines()

    return print_it


def tensor(spec: ShardingSpec, *size: int, ranks: int = 4, **properties: Any) -> Any:
    """A tensor as rank 0 has it, kept after its group is gone."""
    return on_rank_0(ranks, lambda: zeros(spec, *size, **properties))


# -- one line ------------------------------------------------------------------------------------


@each(
    ("spec", "size", "properties", "expected"),
    [
        (
            ChunkShardingSpec(0, places(0, 1, 2, 3)),
            (10, 20),
            {},
            "float32[10, 20] in 4 chunks along dim 0 on ranks 0-3",
        ),
        (
            ChunkShardingSpec(-1, places(1)),
            (10, 20),
            {"dtype": torch.bfloat16},
            "bfloat16[10, 20] in 1 chunk along dim 1 on rank 1",
        ),
        (
            ChunkShardingSpec(0, places(3, 0, 1, 0)),
            (2,),
            {"requires_grad": True},
            "float32[2] in 4 chunks along dim 0 on ranks 0-1, 3, requires_grad",
        ),
        (rows(3, 2, 1), (6, 4), {}, "float32[6, 4] in 3 shards on ranks 0-2"),
        (
            ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"]),
            (4,),
            {},
            "float32[4] in 2 chunks along dim 0 on ranks 0-1 (meta)",
        ),
    ],
)
def test_repr_is_one_line(
    spec: ShardingSpec, size: tuple[int, ...], properties: Any, expected: str
) -> None:
    made = tensor(spec, *size, **properties)
    assert repr(made) == f"ShardedTensor({expected})"
    assert f"{[made]}" == f"[ShardedTensor({expected})]"
    assert str(made).splitlines()[0] == f"ShardedTensor {expected}"


def test_many_ranks_are_abbreviated() -> None:
    spec = ChunkShardingSpec(0, places(*range(0, 40, 2)))
    made = tensor(spec, 20, ranks=40)
    assert "on ranks 0, 2, 4, 6, 8, … (20 in all)" in repr(made)


def test_ranks_that_hold_no_shard_are_not_named_in_the_line() -> None:
    assert "on ranks 0-1" in repr(tensor(ChunkShardingSpec(0, places(0, 1)), 4))


# -- plain text ----------------------------------------------------------------------------------


def test_str_is_the_page_of_show(shown: Callable[..., list[str]]) -> None:
    made = tensor(rows(3, 2, 1), 6, 4)
    assert str(made).splitlines() == shown(made)


def test_print_and_format_are_str(capsys: pytest.CaptureFixture[str]) -> None:
    made = tensor(rows(3, 2), 5, 4)
    print(made)
    assert capsys.readouterr().out == f"{made}\n" == f"{made!s}\n"
    parameter = torch.nn.Parameter(made, requires_grad=False)
    assert f"{parameter}" == f"{made}"


def test_str_has_no_colours_and_communicates_nothing() -> None:
    """Only rank 0 asks; with a communication it would wait for the others."""
    made = on_rank_0(2, lambda: str(zeros(rows(3, 2), 5, 4)))
    assert COLOUR.sub("", made) == made


def test_a_tensor_can_be_shown_when_its_group_is_gone() -> None:
    def program(rank: int) -> Any:
        made = zeros(rows(3, 2), 5, 4)
        dist.destroy_process_group()
        return str(made), repr(made)

    text, line = run_ranks(2, program)[0]
    assert text.startswith("ShardedTensor float32[5, 4]")
    assert line == "ShardedTensor(float32[5, 4] in 2 shards on ranks 0-1)"


def test_ranks_outside_the_group_show_the_same() -> None:
    def program(rank: int) -> str:
        group = dist.new_group([1, 2, 3])
        spec = ChunkShardingSpec(0, places(1, 2))
        return str(zeros(spec, 4, process_group=group))

    outside, *inside = run_ranks(4, program)
    assert inside == [outside] * 3
    assert "rank:3      none" in outside


def test_shards_without_a_group_or_placement() -> None:
    shard = ShardMetadata([0], [3])
    metadata = ShardedTensorMetadata(Items([shard]), torch.Size([3]), TensorProperties())
    made = ShardedTensorBase.from_local_shards_and_global_metadata(
        [Shard(torch.ones(3), shard)], metadata
    )
    assert repr(made) == "ShardedTensorBase(float32[3] in 1 shard on ?)"
    assert "?    [3]       12 B" in str(made)


def test_a_tensor_without_elements_has_no_picture() -> None:
    made = tensor(ChunkShardingSpec(0, places(0, 1)), 0, 4, ranks=2)
    assert str(made).splitlines()[1:] == [
        "",
        "",
        "    who         shards    bytes  share",
        "██  rank:0/cpu  [0, 4]      0 B   0.0%",
        "██  rank:1/cpu  [0, 4]      0 B   0.0%",
        "    all         2 shards    0 B   0.0%",
    ]


# -- show ----------------------------------------------------------------------------------------


def test_show_prints_a_table_of_the_ranks(shown: Callable[..., list[str]]) -> None:
    lines = shown(tensor(rows(3, 2, 1), 6, 4))
    assert lines[0] == "ShardedTensor float32[6, 4] in 3 shards on ranks 0-2"
    assert lines[-6:] == [
        "    who         shards    bytes   share",
        "██  rank:0/cpu  [3, 4]     48 B   50.0%  ████████████████████",
        "██  rank:1/cpu  [2, 4]     32 B   33.3%  ██████████████",
        "██  rank:2/cpu  [1, 4]     16 B   16.7%  ███████",
        "    rank:3      none        0 B    0.0%",
        "    all         3 shards   96 B  100.0%",
    ]


def test_show_says_how_a_spec_would_cut(shown: Callable[..., list[str]]) -> None:
    spec = ChunkShardingSpec(0, places(0, 1, 2, 3, 0))
    lines = shown(spec, size=(4, 1024), dtype=torch.float64)
    assert lines[0] == "float64[4, 1024] in 5 chunks along dim 0 on ranks 0-3"
    assert "██  rank:0/cpu  [1, 1024] + [0, 1024]   8 KiB   25.0%  ████████████████████" in lines


def test_show_names_workers_and_devices(shown: Callable[..., list[str]]) -> None:
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([0], [4], "trainer/cuda:0"),
            ShardMetadata([4], [2], "rank:7/cpu"),
            ShardMetadata([6], [2], "trainer/cuda:1"),
        ]
    )
    lines = shown(spec, size=[8])
    assert lines[0] == "float32[8] in 3 shards on rank 7, trainer (cuda)"
    assert [line.split("  ")[1] for line in lines[-3:-1]] == [
        "rank:7/cpu",
        "trainer/cuda:0+cuda:1",
    ]
    assert "[4] + [2]" in lines[-2]


def test_hundreds_of_ranks_take_one_screen(shown: Callable[..., list[str]]) -> None:
    lines = shown(ChunkShardingSpec(0, places(*range(999))), size=(1000 * 16 - 16 - 3, 8))
    assert len(lines) < 40
    assert re.split(r"\s\s+", lines[-3])[1:4] == ["ranks 0-997", "each [16, 8]", "512 B each"]
    assert lines[-2].startswith("██  rank:998/cpu  [13, 8]")


def test_many_ranks_of_different_loads_are_joined_in_the_end(
    shown: Callable[..., list[str]],
) -> None:
    lines = shown(rows(*range(1, 41)), size=(820, 4))
    assert lines[-3].startswith("██  rank:14/cpu  [15, 4]")
    words = re.split(r"\s\s+", lines[-2])[1:4]
    assert words == ["ranks 15-39", "of several sizes", "256 B to 640 B each"]


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 200])
@pytest.mark.usefixtures("terminal")
def test_show_keeps_to_the_width(shown: Callable[..., list[str]], columns: int) -> None:
    for spec in (
        ChunkShardingSpec(1, places(0, 1, 2)),
        EnumerableShardingSpec(
            [
                ShardMetadata([0, 0], [5, 20], "a-worker-with-a-long-name/cpu"),
                ShardMetadata([5, 0], [5, 20], "another-worker-with-a-long-name/cpu"),
            ]
        ),
    ):
        lines = shown(spec, size=(10, 20), columns=columns)
        assert max(len(COLOUR.sub("", line)) for line in lines) <= columns


@pytest.mark.usefixtures("terminal")
def test_narrow_tables_keep_the_bytes(shown: Callable[..., list[str]]) -> None:
    lines = shown(rows(3, 2), size=(5, 4), columns=24)
    assert COLOUR.sub("", lines[-2]).split() == ["██", "rank:1/cpu", "32", "B"]


def test_colours_on_a_terminal_only(
    shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shown(rows(3, 2), size=(5, 4))
    assert not COLOUR.search("".join(plain))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = shown(rows(3, 2), size=(5, 4))
    assert [COLOUR.sub("", line) for line in coloured] == plain
    backgrounds = set(re.findall(r"48;2;[0-9;]+", "".join(coloured)))
    assert len(backgrounds) == 2, "one colour for each rank"


def test_show_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        show(ChunkShardingSpec(0, places(*range(200))), size=(400, 4))
        out.flush()
        out.seek(0)
        assert "+---" in out.read()


def test_show_communicates_nothing(shown: Callable[..., list[str]]) -> None:
    on_rank_0(2, lambda: show(zeros(rows(3, 2), 5, 4)))


@each(
    ("shown_thing", "arguments", "error", "message"),
    [
        (ChunkShardingSpec(0, places(0)), {}, ValueError, r"say show\(spec, size="),
        (ChunkShardingSpec(2, places(0)), {"size": (4, 4)}, ValueError, "Invalid sharding dim"),
        (torch.ones(3), {}, TypeError, "expected a sharded tensor or a sharding spec, got Tensor"),
        ([1, 2], {}, TypeError, "got list"),
    ],
)
def test_what_cannot_be_shown(
    shown_thing: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        show(shown_thing, **arguments)


def test_a_tensor_has_its_own_size() -> None:
    with pytest.raises(ValueError, match="takes size and dtype only with a sharding spec"):
        show(tensor(rows(3, 2), 5, 4, ranks=2), size=(5, 4))


def test_a_notebook_shows_the_picture_and_asks_no_rank() -> None:
    html = on_rank_0(2, lambda: zeros(rows(3, 2), 5, 4)._repr_html_())
    assert html.startswith("<pre style=")
    assert "<b>ShardedTensor float32[5, 4] in 2 shards on ranks 0-1</b>" in html
    assert '<span style="color:#000;background:#8dd3c7">' in html
    assert "60.0%" in html
