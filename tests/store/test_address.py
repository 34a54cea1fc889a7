"""Where servers listen and how clients find them."""

from __future__ import annotations

import gc
import socket
import stat
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from tests.limits import PROMPTLY
from tests.store.client_process import process
from tilework.errors import DistNetworkError, DistStoreError, StoreTimeoutError
from tilework.store import StoreServer, TCPStore, UnixStore
from tilework.store.address import TcpAddress, UnixAddress
from tilework.testing.stores import Background

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def name() -> str:
    return f"@tilework-test-{uuid.uuid4().hex}"


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listening() -> set[tuple[str, int]]:
    """The IPv4 addresses that this machine's processes listen on."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            host, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_port_0_picks_one() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        assert (store.host, store.port > 0) == ("127.0.0.1", True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_binds_exactly_the_address(host: str) -> None:
    with TCPStore(host, 0, is_master=True) as store:
        bound = {address for address, port in listening() if port == store.port}
        assert bound == {"127.0.0.1"}


def test_all_interfaces_only_when_told() -> None:
    with TCPStore("0.0.0.0", 0, is_master=True) as store:
        assert ("0.0.0.0", store.port) in listening()


def test_the_port_is_free_again_after_close() -> None:
    for port in [0] * 2:
        with TCPStore("127.0.0.1", port, is_master=True) as first:
            taken = first.port
        with TCPStore("127.0.0.1", taken, is_master=True):
            pass


def test_a_dropped_master_gives_up_its_port() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    port = store.port
    del store
    gc.collect()
    assert ("127.0.0.1", port) not in listening()


def test_a_port_in_use_is_named() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True) as store,
        pytest.raises(DistNetworkError, match=rf"127\.0\.0\.1:{store.port}.*in use.*port"),
    ):
        TCPStore("127.0.0.1", store.port, is_master=True)


def test_a_foreign_address_cannot_be_listened_on() -> None:
    with pytest.raises(DistNetworkError, match="not an address of this machine"):
        TCPStore("192.0.2.1", 0, is_master=True)


def test_an_unknown_host_cannot_be_listened_on() -> None:
    with pytest.raises(DistNetworkError, match="cannot be resolved"):
        TCPStore("no-such-host.invalid", 0, is_master=True)


def test_nobody_there_says_what_to_check(free_port: int) -> None:
    begun = time.monotonic()
    with pytest.raises(
        DistNetworkError, match=rf"^Timeout.*127\.0\.0\.1:{free_port}.*0\.3 s.*refused.*rank 0"
    ):
        TCPStore("127.0.0.1", free_port, timeout=SHORT)
    assert time.monotonic() - begun < PROMPTLY


def test_a_client_that_comes_early_waits_for_the_server(free_port: int) -> None:
    call = Background(lambda: TCPStore("127.0.0.1", free_port))
    time.sleep(0.1)
    with TCPStore("127.0.0.1", free_port, is_master=True) as master, call.result() as client:
        master.set("k", "v")
        assert client.get("k") == b"v"


@pytest.mark.parametrize(
    ("host", "port", "match"),
    [("", 1, "host"), ("h", -1, "port"), ("h", 65536, "port"), ("h", 0, "client must name")],
)
def test_addresses_that_are_none(host: str, port: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TCPStore(host, port)


# Workers.


def test_the_master_waits_for_its_workers(free_port: int) -> None:
    call = Background(lambda: TCPStore("127.0.0.1", free_port, 3, is_master=True))
    workers = [TCPStore("127.0.0.1", free_port, 3) for _ in range(2)]
    with call.result() as master:
        master.set("k", "v")
        assert [worker.get("k") for worker in workers] == [b"v"] * 2
        for worker in workers:
            worker.close()


def test_missing_workers_are_counted(free_port: int) -> None:
    with pytest.raises(StoreTimeoutError, match=r"^Timeout.*0\.3 s for 3 workers.*1 came"):
        TCPStore("127.0.0.1", free_port, 3, is_master=True, timeout=SHORT)
    assert ("127.0.0.1", free_port) not in listening()


def test_workers_need_not_be_waited_for() -> None:
    with TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False) as store:
        assert store.num_keys() == 0


# Several stores on one server.


def test_tenants_share_one_server() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True) as first,
        TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True) as second,
    ):
        first.set("k", "v")
        first.close()
        assert second.get("k") == b"v"
        port = second.port
    assert ("127.0.0.1", port) not in listening()


def test_who_is_no_tenant_is_refused() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True) as first,
        pytest.raises(DistNetworkError, match="in use"),
    ):
        TCPStore("127.0.0.1", first.port, is_master=True)


# Servers.


def test_clients_may_come_before_the_server_starts(name: str) -> None:
    with StoreServer.listen_unix(name) as server:
        call = Background(lambda: UnixStore(name))
        time.sleep(0.1)
        server.start()
        server.start()
        with call.result() as store:
            assert store.num_keys() == 0


def test_a_server_closes_once_and_for_all(name: str) -> None:
    server = StoreServer.listen_unix(name)
    server.start()
    server.close()
    server.close()
    with pytest.raises(DistStoreError, match=f"{name} is closed"):
        server.start()
    StoreServer.listen_unix(name).close()


def test_a_server_that_never_started_can_be_closed() -> None:
    server = StoreServer.listen_tcp("127.0.0.1", 0)
    server.close()
    assert ("127.0.0.1", server.port) not in listening()


def test_ranks_forked_before_the_start_do_not_keep_the_address(name: str) -> None:
    program = """
        server = StoreServer.listen_unix(sys.argv[1])
        child = os.fork()
        if child == 0:
            store = UnixStore(sys.argv[1])
            store.set("k", "from the child")
            store.get("never")
        server.start()
        with UnixStore(sys.argv[1]) as store:
            print(store.get("k"), child, flush=True)
        time.sleep(60)
    """
    with process(program, name) as launcher:
        said, child = launcher.line().rsplit(" ", 1)
        assert said == "b'from the child'"
        launcher.kill()
        StoreServer.listen_unix(name).close()
        # The child heard at once that its server is gone, and ended with that error.
        deadline = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not Path(f"/proc/{child}").exists()


# Unix sockets.


def test_a_path_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with UnixStore(str(path), is_master=True):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_path_of_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    program = "store = UnixStore(sys.argv[1], is_master=True); print(1, flush=True); time.sleep(60)"
    with process(program, path) as server:
        assert server.line() == "1"
        server.kill()
    with UnixStore(path, is_master=True) as store:
        store.set("k", "v")


def test_a_live_servers_path_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with (
        UnixStore(path, is_master=True) as store,
        pytest.raises(DistNetworkError, match=f"{path}.*in use"),
    ):
        UnixStore(path, is_master=True)
    assert store


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(DistNetworkError, match="cannot listen"):
        UnixStore(str(path), is_master=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("address", ["", "@", "@" + "x" * 107, "/" + "x" * 107, "a\0b"])
def test_names_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="Unix socket"):
        UnixStore(address)


def test_nobody_there_on_a_unix_socket(name: str) -> None:
    with pytest.raises(DistNetworkError, match=rf"^Timeout.*{name}.*0\.3 s.*launcher"):
        UnixStore(name, timeout=SHORT)


@pytest.mark.parametrize(
    ("host", "one_host"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False)]
)
def test_addresses_that_only_this_host_can_reach(host: str, one_host: bool) -> None:
    assert TcpAddress(host, 1).is_of_one_host == one_host
    assert UnixAddress("@store").is_of_one_host
