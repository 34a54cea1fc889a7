"""Files that others write, damage, fill or leave behind."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.store.client_process import process, processes
from tilework.errors import DistStoreError
from tilework.store import FileStore
from tilework.store.log import HEADER_BYTES, MAGIC, pack
from tilework.store.wire import Code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_an_empty_file_is_fine() -> None:
    with tempfile.NamedTemporaryFile() as file, FileStore(file.name) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_the_file_is_private(path: Path) -> None:
    with FileStore(path) as store:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert store.authenticated
        path.chmod(0o666)
        assert not store.authenticated


def test_the_contents_outlive_the_stores(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
    with FileStore(path) as store:
        assert store.get("k") == b"v"


def test_the_last_of_world_size_users_removes_the_file(path: Path) -> None:
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_a_late_user_still_finds_the_file(path: Path) -> None:
    with FileStore(path, 2) as first:
        first.set("k", "v")
    with FileStore(path, 2) as second:
        assert second.get("k") == b"v"
    assert not path.exists()


def test_without_world_size_the_file_stays(path: Path) -> None:
    FileStore(path).close()
    assert path.exists()


def test_a_dropped_store_is_closed(path: Path) -> None:
    store = FileStore(path, 1)
    del store
    assert not path.exists()


def test_a_file_of_another_store_at_the_same_path_is_not_removed(path: Path) -> None:
    old = FileStore(path, 1)
    path.unlink()
    with FileStore(path) as new:
        old.close()
        new.set("k", "v")
        assert path.exists()


@pytest.mark.parametrize("target", ["missing/store", "."])
def test_a_path_that_cannot_be_a_file(tmp_path: Path, target: str) -> None:
    with pytest.raises(DistStoreError, match=r"FileStore\(.*could not be opened"):
        FileStore(tmp_path / target)


def test_a_pipe_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DistStoreError, match="not a plain file"):
        FileStore(tmp_path / "pipe")


@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04" * 100, MAGIC[:-1] + b"\x09"])
def test_a_foreign_file_is_refused_and_kept(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DistStoreError, match=f"{path}.*something else"):
        FileStore(path)
    assert path.read_bytes() == content


def test_a_damaged_record_is_refused(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v" * 100)
        data = bytearray(path.read_bytes())
        data[-50] ^= 1
        path.write_bytes(data)
        with pytest.raises(DistStoreError, match=f"{path}.*checksum"):
            FileStore(path)


def test_a_file_that_was_cut_is_noticed_by_its_users(path: Path) -> None:
    with FileStore(path) as store:
        os.truncate(path, 20)
        with pytest.raises(DistStoreError, match="shorter"):
            store.check(["k"])


def torn(record: bytes) -> Iterator[bytes]:
    return (record[:size] for size in range(len(record)))


def test_a_torn_last_record_is_ignored_and_repaired(path: Path) -> None:
    for tail in torn(pack(Code.SET, [b"k", b"lost"])):
        path.unlink(missing_ok=True)
        with FileStore(path) as store:
            store.set("k", "kept")
            with path.open("ab") as file:
                file.write(tail)
            assert store.get("k") == b"kept"
            with FileStore(path) as other:
                other.set("l", "new")
            assert store.multi_get(["k", "l"]) == [b"kept", b"new"]


def test_a_torn_beginning_is_repaired(path: Path) -> None:
    for size in range(len(MAGIC)):
        path.write_bytes(MAGIC[:size])
        with FileStore(path) as store:
            store.set("k", "v")
            assert store.get("k") == b"v"


def test_a_damaged_size_is_not_taken_for_a_torn_record(path: Path) -> None:
    with FileStore(path) as store:
        begin = path.stat().st_size
        store.set("k", "v")
        data = bytearray(path.read_bytes())
        data[begin] = 0x7F
        path.write_bytes(data)
        with pytest.raises(DistStoreError, match="checksum"):
            FileStore(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=80), st.integers(0, 200))
@example(b"\0" * HEADER_BYTES, 16)
def test_any_content_is_read_or_refused(tmp_path: Path, noise: bytes, at: int) -> None:
    path = tmp_path / "fuzz"
    path.unlink(missing_ok=True)
    with FileStore(path) as store:
        store.multi_set(["a", "b"], ["1", "2"])
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at:])
    try:
        with FileStore(path) as store:
            assert store.num_keys() <= 2
    except DistStoreError as error:
        said = str(error)
    else:
        return
    assert str(path) in said


def test_records_larger_than_a_read(path: Path) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        sizes = [1, 70_000, 3, 200_000, 0]
        store.multi_set([f"{n}" for n in range(5)], [b"x" * size for size in sizes])
        assert [len(value) for value in other.multi_get([f"{n}" for n in range(5)])] == sizes


def test_only_the_new_tail_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    with FileStore(path) as store, FileStore(path) as other:
        store.set("big", b"x" * 1_000_000)
        other.check(["big"])
        pread = os.pread

        def counting(fd: int, size: int, at: int) -> bytes:
            data = pread(fd, size, at)
            read.append(len(data))
            return data

        monkeypatch.setattr(os, "pread", counting)
        store.set("k", "v")
        assert other.get("k") == b"v"
    assert sum(read) < 1000


def test_polling_with_add_does_not_grow_the_file(path: Path) -> None:
    with FileStore(path) as store:
        store.add("n", 3)
        size = path.stat().st_size
        assert [store.add("n", 0) for _ in range(10)] == [3] * 10
        assert path.stat().st_size == size


def test_a_full_disk_changes_nothing_and_the_store_stays_readable(path: Path) -> None:
    # Where the size of files is limited, writing fails as on a full disk.
    program = """
        import resource
        store = FileStore(sys.argv[1])
        store.set("k", "kept")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            store.multi_set(["small", "k"], ["1", "x" * 50_000])
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        print(store.get("k"), store.check(["small"]), flush=True)
        store.set("k", "after")
        print(store.get("k"), flush=True)
    """
    with process(program, path) as writer:
        said = writer.line()
        assert said.startswith("DistStoreError")
        assert str(path) in said
        assert writer.line() == "b'kept' False"
        assert writer.line() == "b'after'"
        with FileStore(path) as store:
            assert store.get("k") == b"after"


def test_a_really_full_file_system(tmp_path: Path) -> None:
    mounted = os.system(f"mount -t tmpfs -o size=64k tmpfs {tmp_path} 2>/dev/null") == 0
    if not mounted:
        pytest.skip("no right to mount; the test above does the same by a limit")
    try:
        with FileStore(tmp_path / "s") as store:
            store.set("k", "kept")
            with pytest.raises(DistStoreError, match=r"No space left.*Free some space"):
                store.set("big", b"x" * 100_000)
            assert store.get("k") == b"kept"
            assert store.add("n", 1) == 1
    finally:
        os.system(f"umount {tmp_path}")


def test_adds_of_many_processes_all_count(path: Path) -> None:
    program = """
        store = FileStore(sys.argv[1], 4)
        print(*[store.add("n", 1) for _ in range(50)], flush=True)
        sys.stdin.readline()
    """
    with processes(4, program, path) as workers:
        seen = [int(number) for worker in workers for number in worker.line().split()]
        for worker in workers:
            worker.say("end")
        assert [worker.wait() for worker in workers] == [0] * 4
    assert sorted(seen) == list(range(1, 201))
    assert not path.exists()


def test_a_writer_killed_at_any_moment_leaves_a_good_store(path: Path) -> None:
    program = """
        store = FileStore(sys.argv[1])
        print("begun", flush=True)
        while True:
            store.set("k", "x" * 3_000_000)
            store.add("n", 1)
    """
    with FileStore(path) as store:
        for delay in (0.0, 0.003, 0.01, 0.02):
            with process(program, path) as writer:
                assert writer.line() == "begun"
                time.sleep(delay)
                writer.kill()
            store.set("after", f"{delay}")
            with FileStore(path) as other:
                assert other.get("after") == f"{delay}".encode()
                assert store.add("n", 1) == other.add("n", 0)


def test_a_stopped_process_that_holds_the_lock_is_told_apart(path: Path) -> None:
    program = """
        import fcntl
        file = open(sys.argv[1], "r+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(60)
    """
    with FileStore(path, timeout=timedelta(seconds=0.2)) as store, process(program, path) as other:
        assert other.line() == "locked"
        other.stop()
        with pytest.raises(DistStoreError, match=r"^Timeout.*lock.*stopped"):
            store.set("k", "v")
        other.kill()
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_a_forked_child_has_a_lock_of_its_own(path: Path) -> None:
    program = """
        store = FileStore(sys.argv[1], 1)
        child = os.fork()
        seen = [store.add("n", 1) for _ in range(50)]
        if child == 0:
            store.set("child", "done")
            sys.exit(0)  # Does not count as a user, so the file is still there.
        os.waitpid(child, 0)
        print(store.get("child"), store.get("n"), os.path.exists(sys.argv[1]), flush=True)
    """
    with process(program, path) as parent:
        assert parent.line() == "b'done' b'100' True"
        assert parent.wait() == 0
    assert not path.exists()
