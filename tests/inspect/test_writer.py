"""``trace``: what is written while ranks run, and left by ranks that are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tilework import checkpoint
from tilework.capture import capture
from tilework.comm.world import current_world
from tilework.inspect import TraceError, read_timeline, trace, writer
from tilework.parallel import fully_shard
from tilework.testing import run_ranks


def test_a_killed_rank_leaves_what_it_wrote(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path):
            for _ in range(10):
                dist.barrier()
            with dist.span("last words"):
                while not (own := tmp_path / f"rank-{rank}.jsonl").exists():
                    time.sleep(0.01)
                while b"last words" not in own.read_bytes():
                    time.sleep(0.01)
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()

    run_ranks(2, program, kind="processes", return_exceptions=True)
    timeline = read_timeline(tmp_path)
    assert [len(t.operations) >= 10 for t in timeline.ranks] == [True, True]
    assert [(s.name, s.closed) for s in timeline.ranks[1].spans] == [("last words", False)]
    assert any(
        "rank 1 has no end: the rank still runs, or was killed" in p for p in timeline.problems
    )


def test_groups_made_and_destroyed_in_the_block_are_seen(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path):
            group = dist.new_group([0, 1], group_desc="pair")
            dist.barrier(group)
            dist.destroy_process_group(group)

    run_ranks(2, program)
    titles = [m.group.title for m in read_timeline(tmp_path).meetings if m.complete]
    assert "pair" in titles


def test_a_second_trace_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path / "a"):
            told = pytest.raises(TraceError, match=r"traced already .*end that trace first")
            with told, trace(tmp_path / "b"):
                pass
            dist.barrier()

    run_ranks(2, program)
    assert len(read_timeline(tmp_path / "a").meetings) == 1


def test_a_new_job_replaces_the_files_of_the_former(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path):
            dist.barrier()

    run_ranks(4, program)
    run_ranks(2, program)
    assert [t.rank for t in read_timeline(tmp_path).ranks] == [0, 1]
    assert read_timeline(tmp_path).problems == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = pytest.raises(TraceError, match="file' for the trace cannot be made: File exists")
    with told, trace(tmp_path / "file"):
        pass
    assert current_world().sink is None


def test_a_full_file_says_so(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path, most_bytes=4000):
            for _ in range(6):
                for _ in range(100):
                    dist.barrier()
                time.sleep(0.3)

    run_ranks(2, program)
    assert any("was full after" in problem for problem in read_timeline(tmp_path).problems)
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 5000


def test_operations_of_the_fast_path_are_seen_each(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        x = torch.ones(10)
        with trace(tmp_path):
            for step in range(3000):
                dist.all_reduce(x)
                if step % 500 == 0:
                    time.sleep(0.3)

    run_ranks(2, program, kind="processes")
    timeline = read_timeline(tmp_path)
    assert [m.number for m in timeline.meetings if m.complete][-3000:] == list(range(1, 3001))
    assert timeline.problems == []


def test_spans_with_strange_names_are_written(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with trace(tmp_path), dist.span('a\n"b"\x1b'), dist.span(""):
            dist.barrier()

    run_ranks(1, program)
    assert [s.name for s in read_timeline(tmp_path).ranks[0].spans] == ['a "b"?', ""]


def test_a_trace_that_cannot_be_written_does_not_end_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MOST_SECONDS", 3600.0)  # nothing is written before the end

    def program(rank: int) -> bool:
        with trace(tmp_path / "gone"):
            (tmp_path / "gone").rmdir()
            dist.barrier()
        return True

    assert run_ranks(1, program) == [True]
    assert "gone' ends here: No such file or directory" in capfd.readouterr().err


def test_units_captured_steps_and_checkpoints_have_spans(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4))
        step = capture(lambda x: dist.all_reduce(x + 1))
        with trace(tmp_path / "trace"):
            model(torch.ones(2, 4)).sum().backward()
            checkpoint.save(model.state_dict(), tmp_path / "saved")
            for _ in range(4):
                step(torch.ones(3))

    run_ranks(2, program)
    for rank in read_timeline(tmp_path / "trace").ranks:
        names = {span.name for span in rank.spans}
        assert {"Linear (weight and 1 more)", "save a checkpoint", "captured step"} <= names
        assert "add test_writer.py" in {name.partition(":")[0] for name in names}  # instructions
        steps = [op.site for op in rank.operations if op.what == "all_reduce float32 [3] SUM"]
        assert len(steps) >= 4  # a call that is checked runs twice
        assert all(site.startswith(__file__) for site in steps)
