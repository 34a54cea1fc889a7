"""Other users of the machine, and processes that are no part of the job: they get nothing.

See also tests/store/test_server.py (garbage, secrets) and, for the socket by which a shm group is
made, tests/comm/backends/shm/test_shm_backend_bringup.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tilework.comm.backends.shm import shm_backend
from tilework.errors import DistError, DistNetworkError, DistStoreError
from tilework.framed import knock
from tilework.store import FileStore, Store, StoreServer, TCPStore, UnixStore, wire
from tilework.testing import run_ranks

NOBODY = 65534
LIMIT = timedelta(seconds=120)
SECRET = b"only the job knows"

as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
on_shm = pytest.mark.skipif(not dist.is_shm_available(), reason="the core is not built")


def become_nobody() -> None:
    """Another user, with nothing of root's left."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def refusal(attempt: Callable[[int], object], pid: int) -> str:
    """How the kernel refuses it: "EACCES" or the like; what it got if it does not."""
    try:
        return f"got {attempt(pid)!r}"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


# -- a group that is there ------------------------------------------------------------------


def read_memory(pid: int) -> int:
    """One byte of a process's memory, by the system call for that."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(1)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 1)
    got = libc.process_vm_readv(pid, vector, 1, vector, 1, 0)
    if got < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return int(got)


def take_descriptor(pid: int) -> int:
    """A copy of a process's descriptor 0."""
    pidfd_getfd = 438
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.syscall(pidfd_getfd, os.pidfd_open(pid), 0, 0)
    if got < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(got)


BREAK_INS: dict[str, Callable[[int], object]] = {
    "descriptors": lambda pid: os.listdir(f"/proc/{pid}/fd"),
    "mapped files": lambda pid: os.listdir(f"/proc/{pid}/map_files"),
    "map": lambda pid: Path(f"/proc/{pid}/maps").read_text(),
    "memory": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
    "memory by system call": read_memory,
    "a descriptor by system call": take_descriptor,
    "environment": lambda pid: Path(f"/proc/{pid}/environ").read_bytes(),
}


@on_shm
@as_another_user
def test_another_user_reads_nothing_of_a_group(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = FileStore(str(tmp_path / "store"))
        if rank == 2:
            victim = int(store.get("victim"))
            become_nobody()
            say({name: refusal(attempt, victim) for name, attempt in BREAK_INS.items()})
            return
        dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=LIMIT)
        dist.all_reduce(torch.ones(1000))
        store.set("victim", str(os.getpid()))
        store.wait(["over"])
        say("went on")

    with ForkedRanks(3, story) as ranks:
        refused = ranks[2].hear()
        FileStore(str(tmp_path / "store")).set("over", "")
        assert [rank.hear() for rank in ranks.others(2)] == ["went on"] * 2
    assert {name: how for name, how in refused.items() if how not in ("EACCES", "EPERM")} == {}


def held_by_name() -> set[str]:
    """What this process holds that others might find: mapped files, descriptors, sockets."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    descriptors = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    links = {os.readlink(path) for path in descriptors if path.is_symlink()}
    sockets = [line.split()[-2:] for line in Path("/proc/net/unix").read_text().splitlines()]
    names = {name for inode, name in sockets if f"socket:[{inode}]" in links}
    return {name for name in mapped if "/dev/shm/" in name} | names | links


@on_shm
def test_a_group_has_no_name_anywhere(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        store = FileStore(str(tmp_path / "store"))
        before = held_by_name()
        dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=LIMIT)
        dist.barrier()
        say(("/memfd:" in Path("/proc/self/maps").read_text(), held_by_name() - before))
        dist.barrier()
        store.close()

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            mapped, held = rank.hear()
            assert mapped
            # No socket to ask at and no file to open; its descriptors are the user's own.
            named = {name for name in held if not name.startswith("/memfd:")}
            assert [name for name in named if "tilework" in name or "/dev/shm/" in name] == []


# -- a group that is being made --------------------------------------------------------------


def flood(name: str, hello: bytes, begun: int, stop: int) -> int:
    """Connect as often as can be to the socket at which a group is made, and never hang up.

    Until the descriptor ``stop`` is at its end; writes to ``begun`` when the first 20 are made.
    """
    held: list[socket.socket] = []
    served = 0
    while not select.select([stop], [], [], 0)[0]:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.setblocking(False)
        held.append(caller)
        with contextlib.suppress(OSError):  # busy, or the group is made
            caller.connect(f"\0{name}")
            served += 1
            if hello:
                caller.send(hello)
        if len(held) == 20:
            os.write(begun, b"..")
        if len(held) > 200:
            held.pop(0).close()
    return served


@on_shm
@pytest.mark.parametrize("hello", [b"", b"\xff" * 20, b"\xff" * 100_000], ids=len)
@pytest.mark.parametrize(
    "who", [pytest.param("another user", marks=as_another_user), "the same user"]
)
def test_a_flood_of_connections_stops_no_group(who: str, hello: bytes, tmp_path: Path) -> None:
    stop, done = os.pipe()
    begun, begin = os.pipe()

    def story(rank: int, say: Say) -> None:
        store = FileStore(str(tmp_path / "store"))
        if rank == 3:
            os.close(done)
            # As everybody can read in /proc/net/unix.
            name = store.get("shm/host").decode().partition(" ")[0]
            if who == "another user":
                become_nobody()
            say(flood(name, hello, begin, stop))
            return
        if rank > 0:  # the stranger is there first
            os.read(begun, 1)
        request = dist.DistributedBackendOptions(store, rank, 3, LIMIT, "g", (0, 1, 2))
        group = shm_backend.create_shm_group(request, None)
        group.barrier()
        say("made")
        group.close()

    with ForkedRanks(4, story) as ranks:
        try:
            assert [rank.hear() for rank in ranks.others(3)] == ["made"] * 3
        finally:
            os.close(done)
        assert ranks[3].hear() > 0
    for descriptor in (stop, begun, begin):
        os.close(descriptor)


@on_shm
def test_who_knows_the_nonce_must_be_a_rank_that_is_awaited() -> None:
    store = dist.HashStore()

    def program(rank: int) -> list[list[int]]:
        request = dist.DistributedBackendOptions(store, rank, 2, LIMIT, "g", (0, 1))
        handed = []
        if rank == 1:
            name, nonce, _ = store.get("shm/host").decode().split(" ", 2)
            for other in (0, 2, 2**32 - 1):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.settimeout(5.0)
                    stranger.connect(f"\0{name}")
                    knock(stranger, bytes.fromhex(nonce), other)
                    handed.append(socket.recv_fds(stranger, 1, 4)[1])
        group = shm_backend.create_shm_group(request, None)
        group.barrier()
        group.close()
        return handed

    assert run_ranks(2, program, init=False) == [[], [[]] * 3]


# -- stores ----------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="tilework-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@as_another_user
def test_another_user_reaches_no_store(open_folder: Path) -> None:
    path, name = str(open_folder / "socket"), f"@tilework-test-{uuid.uuid4().hex}"
    with (
        StoreServer.listen_unix(path, SECRET) as by_path,
        StoreServer.listen_unix(name, SECRET) as by_name,
        StoreServer.listen_tcp("127.0.0.1", 0, SECRET) as by_port,
        FileStore(str(open_folder / "file")) as in_file,
    ):
        for server in (by_path, by_name, by_port):
            server.start()
        in_file.set("key", "value")
        short = timedelta(seconds=1)
        attempts: dict[str, Callable[[], Store]] = {
            # Even with the secret: what the kernel says of a process comes before.
            "path": lambda: UnixStore(path, timeout=short, secret=SECRET),
            "name": lambda: UnixStore(name, timeout=short, secret=SECRET),
            "port": lambda: TCPStore("127.0.0.1", by_port.port, timeout=short),
            "file": lambda: FileStore(str(open_folder / "file"), timeout=short),
        }

        def story(rank: int, say: Say) -> None:
            become_nobody()
            said = {}
            for kind, attempt in attempts.items():
                try:
                    said[kind] = f"got {attempt()}"
                except DistError as error:
                    said[kind] = f"{type(error).__name__}: {error}"
            say(said)

        with ForkedRanks(1, story) as ranks:
            said = ranks[0].hear()
        assert stat.S_IMODE(os.stat(open_folder / "file").st_mode) == 0o600
        # The job goes on.
        with UnixStore(name, secret=SECRET) as ours:
            ours.set("key", "value")
            assert ours.get("key") == b"value"
    assert "DistNetworkError" in said["path"]
    assert "it belongs to user 0, this process to user 65534" in said["name"]
    assert "requires the job's secret" in said["port"]
    assert "could not be opened: Permission denied" in said["file"]


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> StoreServer:
    if request.param == "unix":
        return StoreServer.listen_unix(f"@tilework-test-{uuid.uuid4().hex}", SECRET)
    return StoreServer.listen_tcp("127.0.0.1", 0, SECRET)


def connected(server: StoreServer, secret: bytes) -> Store:
    if server.port:
        return TCPStore("127.0.0.1", server.port, timeout=LIMIT, secret=secret)
    return UnixStore(str(server.address), timeout=LIMIT, secret=secret)


def test_a_wrong_secret_is_told_on_both_sides(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tilework"), server:
        server.start()
        with connected(server, SECRET) as ours:
            with pytest.raises(DistNetworkError, match="its secret is wrong"):
                connected(server, SECRET[:-1])
            ours.set("key", "the job goes on")
            assert ours.get("key") == b"the job goes on"
    assert "its secret is wrong" in caplog.text


def test_a_message_over_the_bound_is_refused(server: StoreServer) -> None:
    with server:
        server.start()
        with connected(server, SECRET) as store:
            with pytest.raises((ValueError, DistStoreError), match=str(wire.MAX_MESSAGE_BYTES)):
                store.set("key", bytes(wire.MAX_MESSAGE_BYTES))
            store.set("key", "still served")
            assert store.get("key") == b"still served"
