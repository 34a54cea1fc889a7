"""When flight records are written, and that writing them harms nobody."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import join
from tilework.comm.flight import document, dump, watch
from tilework.comm.flight.document import Record, decode
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 here")
SOON = timedelta(seconds=0.3)


def record_of(folder: Path, rank: int, wanted: Callable[[Record], bool] = bool) -> Record:
    """A rank's record, once it is there and as ``wanted``."""
    path = folder / f"rank-{rank}.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and wanted(record := decode(path.read_bytes())):
            return record
        time.sleep(0.01)
    raise AssertionError(f"no such record came: {sorted(os.listdir(folder))}")


def last_outcome(record: Record) -> str:
    return record.groups[0].entries[-1].outcome


# -- faults -----------------------------------------------------------------------------------


def disagree(rank: int) -> type[BaseException]:
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        dist.broadcast(torch.ones(3 + rank), src=0)
    return caught.type


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_a_fault_is_written(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(folder))
    run_ranks(2, disagree, backend=backend)
    assert sorted(os.listdir(folder)) == ["rank-0.json", "rank-1.json"]
    for rank in range(2):
        record = record_of(folder, rank)
        assert (record.rank, record.world_size, record.pid) == (rank, 2, os.getpid())
        assert record.faults[0].text.startswith("CollectiveMismatchError: ")
        (group,) = record.groups
        assert (group.name, group.backend, group.ranks) == ("default", backend, (0, 1))
        assert last_outcome(record).startswith("failed: CollectiveMismatchError: ")
        # The rank's own thread comes first, and stands where the user's code does.
        assert record.stacks[0].thread == f"rank {rank}"
        assert record.stacks[0].site.endswith(" in disagree")
        assert record.stacks[0].inside


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TILEWORK_FLIGHT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    run_ranks(2, disagree)
    assert os.listdir(tmp_path) == []


def test_the_first_faults_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path))

    def program(rank: int) -> None:
        disagree(rank)
        for _ in range(20):
            with pytest.raises(dist.DistBackendError):
                dist.barrier()

    run_ranks(2, program)
    faults = record_of(tmp_path, 0).faults
    assert len(faults) == 8
    assert "rank 1 broadcast float32 [4]" in faults[0].text


def test_a_slower_writer_does_not_put_back_an_older_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that watches the rank writes, too; the rank fails before that is done."""
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path))
    encode, began, failed = document.encode, threading.Event(), threading.Event()

    def encode_slowly(record: Record) -> bytes:
        if threading.current_thread().name == "slow" and record.rank == 0:
            began.set()
            assert failed.wait(120)
        return encode(record)

    monkeypatch.setattr(document, "encode", encode_slowly)

    def program(rank: int) -> None:
        slow = threading.Thread(target=dump.write_all, name="slow")
        if rank == 0:
            slow.start()
            assert began.wait(120)
        disagree(rank)
        if rank == 0:
            failed.set()
            slow.join()
            assert record_of(tmp_path, 0).faults

    run_ranks(2, program)
    assert sorted(os.listdir(tmp_path)) == ["rank-0.json", "rank-1.json"]


def test_who_left_its_groups_does_not_forget_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path))

    def program(rank: int) -> None:
        disagree(rank)
        dist.destroy_process_group()
        dump.write_all()

    run_ranks(2, program)
    assert len(record_of(tmp_path, 0).groups) == 1


def complaints(rank: int, ranks: Path) -> list[str]:
    return [line for line in (ranks / f"err-{rank}").read_text().splitlines() if "flight" in line]


@pytest.mark.parametrize("trouble", ["full", "a file in the way", "a device"])
def test_what_cannot_be_written_is_one_line(trouble: str, tmp_path: Path) -> None:
    folder = {"full": tmp_path / "full", "a device": Path("/dev/full/x")}.get(trouble)
    if folder is None:
        folder = tmp_path / "way"
        folder.write_text("")

    def story(rank: int, say: Say) -> None:
        os.environ["TILEWORK_FLIGHT_DIR"] = str(folder)
        store = join(rank, 2, tmp_path / "store", timedelta(seconds=20))
        words = os.open(tmp_path / f"err-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(words, 2)
        if trouble == "full":
            # Standard error may grow a little, a record not so much.
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        say(disagree(rank))
        with pytest.raises(dist.DistBackendError):
            dist.barrier()  # complains no more
        store.close()
        say("went on")

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            assert rank.hear() is dist.CollectiveMismatchError
            assert rank.hear() == "went on"
    for number in range(2):
        (line,) = complaints(number, tmp_path)
        assert line.startswith(f"tilework: cannot write the flight record to '{folder}': ")
    if trouble == "full":
        assert os.listdir(folder) == []  # not a part of it, either


# -- SIGUSR1 ----------------------------------------------------------------------------------


def barrier_later(pipe: int) -> None:
    """In the core, until the other rank comes."""
    dist.barrier()


def read_pipe(pipe: int) -> None:
    """In native code that knows no Python and no signals; the call is restarted after each."""
    library = ctypes.CDLL(None)
    library.read(pipe, ctypes.create_string_buffer(1), 1)


def spin(pipe: int) -> None:
    """In Python."""
    while not select.select([pipe], [], [], 0)[0]:
        pass
    os.read(pipe, 1)


@pytest.mark.parametrize("place", [barrier_later, read_pipe, spin])
def test_sigusr1_wherever_a_rank_is(place: Callable[[int], None], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    folder = tmp_path / "flight"

    def story(rank: int, say: Say) -> None:
        os.environ["TILEWORK_FLIGHT_DIR"] = str(folder)
        store = join(rank, 2, tmp_path / "store")
        dist.barrier()
        say("ready")
        if rank == 0:
            place(reader)
        else:
            os.read(reader, 1)
        if rank == 1 and place is barrier_later:
            dist.barrier()
        total = torch.ones(2)
        dist.broadcast(total, src=0)
        say("unharmed")
        store.close()

    def is_there(record: Record) -> bool:
        return f" in {place.__name__}" in str(record.stacks[0].frames)

    try:
        with ForkedRanks(2, story) as ranks:
            for rank in ranks:
                assert rank.hear() == "ready"
            while True:
                ranks[0].kill(signal.SIGUSR1)
                if is_there(record_of(folder, 0)):
                    break
            record = record_of(folder, 0)
            assert record.stacks[0].thread == "MainThread"
            assert record.faults == ()
            assert (last_outcome(record) == "running") == (place is barrier_later)
            os.write(writer, b"..")
            assert [rank.hear() for rank in ranks] == ["unharmed"] * 2
        assert not (folder / "rank-1.json").exists()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process listens for SIGUSR1."""
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path))
    with watch.armed():
        yield tmp_path


def test_sigusr1_for_ranks_that_are_threads(armed: Path) -> None:
    # Each is where it is when asked, so ask until both others have come.
    def asked(rank: int) -> list[str]:
        dist.barrier()  # so that every rank has its group when the signal comes
        if rank < 2:
            dist.barrier()
            return []
        while True:
            os.kill(os.getpid(), signal.SIGUSR1)
            records = [record_of(armed, other) for other in range(3)]
            if all(r.groups[0].entries for r in records[:2]):
                break
            time.sleep(0.01)
        dist.barrier()
        return [record.stacks[0].thread for record in records]

    assert run_ranks(3, asked)[2] == ["rank 0", "rank 1", "rank 2"]


def test_a_users_handler_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        monkeypatch.setenv("TILEWORK_FLIGHT_DIR", str(tmp_path))
        with watch.armed():
            run_ranks(2, lambda rank: dist.barrier())
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert os.listdir(tmp_path) == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_a_folder_signals_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_FLIGHT_DIR", raising=False)
    with watch.armed():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_nothing_is_left_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", "somewhere")
    with watch.armed():
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert watch.WATCHER_NAME not in [thread.name for thread in threading.enumerate()]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_forked_child_is_no_rank(armed: Path) -> None:
    sys.stdout.flush()
    with ForkedRanks(1, lambda rank, say: say(signal.getsignal(signal.SIGUSR1))) as ranks:
        assert ranks[0].hear() is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)  # the parent still listens; no rank is known here
    assert os.listdir(armed) == []


def test_a_forked_child_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_FLIGHT_DIR", "somewhere")
    with watch.armed():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        begun = time.monotonic()
    took = time.monotonic() - begun
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert took < 40  # of 60
