"""The server and its clients when things go wrong: garbage, deaths, crowds, secrets."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.limits import PROMPTLY
from tests.store.client_process import process, processes
from tilework.errors import DistNetworkError, DistStoreError, StoreTimeoutError
from tilework.store import HashStore, PrefixStore, StoreServer, TCPStore, UnixStore, wire
from tilework.store.wire import Code
from tilework.testing.stores import Background

SECRET = b"the secret of this test"
SHORT = timedelta(seconds=0.2)
HELLO = wire.encode(Code.HELLO, (wire.MAGIC, bytes(wire.NONCE_BYTES)))


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        server.start()
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", server.port) as store:
        yield store


def raw(server: StoreServer, *, greeted: bool = False) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    if greeted:
        sock.sendall(HELLO)
        assert sock.recv(100) == wire.encode(Code.WELCOME)
    return sock


def hangs_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


# Garbage.


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        wire.encode(Code.SET, (b"k", b"v")),
        wire.encode(Code.HELLO, (wire.MAGIC, b"short")),
        struct.pack("!IB", wire.MAX_GREETING_BYTES + 1, Code.HELLO),
    ],
)
def test_a_stranger_is_hung_up_on(server: StoreServer, garbage: bytes) -> None:
    with raw(server) as sock:
        sock.sendall(garbage)
        assert hangs_up(sock)


@pytest.mark.parametrize(
    "request_",
    [
        wire.encode(Code.OK),
        wire.encode(Code.SET, (b"k",)),
        wire.encode(Code.SET, (b"k" * 70_000, b"v")),
        wire.encode(Code.ADD, (b"k", b"1")),
        wire.encode(Code.GET),
        wire.encode(Code.MULTI_SET, (b"k",)),
        wire.encode(Code.WAIT_WORKERS, (b"", b"")),
        wire.encode(Code.NUM_KEYS, (b"k",)),
        wire.encode(Code.NUM_KEYS) * 2,
        struct.pack("!IB", wire.MAX_MESSAGE_BYTES + 1, Code.SET),
        struct.pack("!IBI", 4, 200, 0),
    ],
)
def test_a_client_that_breaks_the_protocol_is_hung_up_on(
    server: StoreServer, store: TCPStore, request_: bytes
) -> None:
    with raw(server, greeted=True) as sock:
        sock.sendall(request_)
        assert hangs_up(sock)
    assert store.num_keys() == 0


def test_a_request_while_one_waits_is_garbage(server: StoreServer) -> None:
    with raw(server, greeted=True) as sock:
        sock.sendall(wire.encode(Code.WAIT, (wire.encode_number(10_000), b"k")))
        time.sleep(0.05)
        sock.sendall(wire.encode(Code.NUM_KEYS))
        assert hangs_up(sock)


def test_keys_that_are_no_text_harm_nobody(server: StoreServer, store: TCPStore) -> None:
    with raw(server, greeted=True) as sock:
        sock.sendall(wire.encode(Code.SET, (b"\xff", b"x")))
        assert sock.recv(100) == wire.encode(Code.OK)
        sock.sendall(wire.encode(Code.ADD, (b"\xff", wire.encode_number(1))))
        assert b"add needs an integer" in sock.recv(1000)
    assert store.num_keys() == 1


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.booleans(),
    st.binary(max_size=60)
    | st.builds(
        lambda code, fields: (
            struct.pack("!IB", sum(4 + len(f) for f in fields), code)
            + b"".join(struct.pack("!I", len(f)) + f for f in fields)
        ),
        st.integers(0, 70),
        st.lists(st.binary(max_size=8) | st.just(wire.encode_number(0)), max_size=4),
    ),
)
def test_no_bytes_harm_the_server(
    server: StoreServer, store: TCPStore, greeted: bool, noise: bytes
) -> None:
    with raw(server, greeted=greeted) as sock:
        sock.sendall(noise)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_half_messages_do_not_hold_up_others(server: StoreServer, store: TCPStore) -> None:
    with ExitStack() as stack:
        for size in range(1, 40):
            stack.enter_context(raw(server)).sendall(HELLO[:size])
        half = wire.encode(Code.SET, (b"k", b"v" * 1_000_000))[:-10]
        stack.enter_context(raw(server, greeted=True)).sendall(half)
        begun = time.monotonic()
        store.set("k", "v")
        assert store.get("k") == b"v"
        assert time.monotonic() - begun < PROMPTLY


def test_who_does_not_read_its_answer_does_not_hold_up_others(
    server: StoreServer, store: TCPStore
) -> None:
    store.set("big", b"x" * 20_000_000)
    with raw(server, greeted=True) as sock:
        sock.sendall(wire.encode(Code.GET, (wire.encode_number(0), b"big")))
        begun = time.monotonic()
        assert store.add("n", 1) == 1
        assert time.monotonic() - begun < PROMPTLY


def test_a_waiting_client_that_goes_away_is_forgotten(server: StoreServer, store: TCPStore) -> None:
    with raw(server, greeted=True) as sock:
        sock.sendall(wire.encode(Code.WAIT, (wire.encode_number(60_000), b"k")))
        time.sleep(0.05)
    time.sleep(0.05)
    store.set("k", "v")
    assert store.get("k") == b"v"


# Other servers.


@contextmanager
def fake_server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Something that is not a store's server; ``answer`` gets each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, suppress(OSError):
                answer(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0" * 5,
        wire.encode(Code.WELCOME) + b"more",
        wire.encode(Code.OK),
        struct.pack("!IB", 1 << 30, Code.WELCOME),
    ],
)
def test_another_service_on_the_port_is_told_apart(answer: bytes) -> None:
    with (
        fake_server(lambda sock: sock.sendall(answer)) as port,
        pytest.raises(DistNetworkError, match=rf"127\.0\.0\.1:{port}.*protocol"),
    ):
        TCPStore("127.0.0.1", port)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=60))
def test_no_bytes_from_a_server_harm_the_client(noise: bytes) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(wire.encode(Code.WELCOME))
        sock.recv(1000)
        sock.sendall(noise)

    with fake_server(answer) as port, pytest.raises((DistNetworkError, DistStoreError)):
        UsedOnce("127.0.0.1", port).num_keys()


class UsedOnce(TCPStore):
    """A client whose first request is the test's."""

    def _join(self, wait_for: int | None) -> None:
        pass


def test_a_server_that_hangs_up_is_given_up_on() -> None:
    with (
        fake_server(lambda sock: None) as port,
        pytest.raises(DistNetworkError, match="hangs up without a greeting"),
    ):
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3))


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DistNetworkError, match=r"^Timeout.*0\.2 s"):
            TCPStore("127.0.0.1", port, timeout=SHORT)


# Deaths.

SERVE = """
    secret = None
    if sys.argv[1] == "tcp":
        server = StoreServer.listen_tcp("127.0.0.1", 0)
    else:
        server = StoreServer.listen_unix(sys.argv[1])
    server.start()
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(60)
    print(server.address, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a forked child"])
def test_the_death_of_the_server_is_noticed_at_once(place: str, with_child: bool) -> None:
    name = "tcp" if place == "tcp" else f"@tilework-test-{uuid.uuid4().hex}"
    with process(SERVE, name, *["fork"] * with_child) as server:
        address = server.line()
        store = (
            TCPStore("127.0.0.1", int(address.split(":")[1]))
            if place == "tcp"
            else UnixStore(address)
        )
        with store:
            calls = [Background(lambda: store.get("k")) for _ in range(3)]
            time.sleep(0.1)
            server.kill()
            begun = time.monotonic()
            for call in calls:
                with pytest.raises(DistNetworkError, match=rf"{address}.*is gone"):
                    call.result()
            with pytest.raises(DistNetworkError, match=address):
                store.set("k", "v")
            assert time.monotonic() - begun < PROMPTLY
    _end_children_of(name, with_child)


def _end_children_of(name: str, with_child: bool) -> None:
    """The forked child sleeps on; it is the only process with the test's unique argument."""
    if not with_child:
        return
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-3:-1] == [name.encode(), b"fork"] and b"StoreServer" in b" ".join(words):
            os.kill(int(entry.parent.name), signal.SIGKILL)


def test_a_stopped_server_times_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilework.store.checks.GRACE_SECONDS", 0.2)
    with process(SERVE, "tcp") as server:
        port = int(server.line().split(":")[1])
        with TCPStore("127.0.0.1", port, timeout=SHORT) as store:
            server.stop()
            with pytest.raises(DistStoreError, match=r"^Timeout.*did not answer"):
                store.set("k", "v")
            server.resume()
            store.set("k", "v")
            assert store.get("k") == b"v"


def no_more(*args: object, **kwargs: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_server_that_can_have_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with StoreServer.listen_tcp("127.0.0.1", 0) as server:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(DistStoreError, match="cannot serve: can't start new thread"):
                server.start()
        server.start()  # now it can
        with TCPStore("127.0.0.1", server.port) as store:
            store.set("k", "v")


def test_a_process_that_may_open_no_more_files_says_so(
    monkeypatch: pytest.MonkeyPatch, server: StoreServer
) -> None:
    port = server.port
    monkeypatch.setattr(socket, "socket", no_more)
    with pytest.raises(DistNetworkError, match=r"cannot connect.*open files.*ulimit"):
        TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))  # it does not wait for so long
    for listen, where in (("tcp", ("127.0.0.1", 0)), ("unix", (f"@tilework-{uuid.uuid4()}",))):
        with pytest.raises(DistNetworkError, match=r"cannot listen.*ulimit -n"):
            getattr(StoreServer, f"listen_{listen}")(*where)


def test_nothing_is_left_of_a_killed_server() -> None:
    name = f"@tilework-test-{uuid.uuid4().hex}"
    for _ in range(2):
        with process(SERVE, name) as server:
            assert server.line() == name
            server.kill()


def test_a_killed_client_leaves_the_store_to_others(server: StoreServer, store: TCPStore) -> None:
    program = """
        store = TCPStore("127.0.0.1", int(sys.argv[1]))
        print("begun", flush=True)
        while True:
            store.set("theirs", "x" * 1_000_000)
    """
    with process(program, server.port) as client:
        assert client.line() == "begun"
        time.sleep(0.02)
        client.kill()
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_adds_of_many_processes_all_count(server: StoreServer) -> None:
    program = """
        store = TCPStore("127.0.0.1", int(sys.argv[1]))
        print(*[store.add("n", 1) for _ in range(100)], flush=True)
    """
    with processes(4, program, server.port) as workers:
        seen = [int(number) for worker in workers for number in worker.line().split()]
    assert sorted(seen) == list(range(1, 401))


def test_a_forked_child_has_connections_of_its_own() -> None:
    program = """
        store = TCPStore("127.0.0.1", 0, is_master=True)
        child = os.fork()
        seen = [store.add("n", 1) for _ in range(100)]
        if child == 0:
            store.set("child", "done")
            store.close()  # Closes neither the parent's connection nor its server.
            os._exit(0)
        os.waitpid(child, 0)
        print(store.get("child"), store.get("n"), flush=True)
    """
    with process(program) as parent:
        assert parent.line() == "b'done' b'200'"
        assert parent.wait() == 0


# Crowds.


def test_a_thousand_clients_wait_in_one_thread(server: StoreServer, store: TCPStore) -> None:
    request = wire.encode(Code.WAIT, (wire.encode_number(60_000), b"go"))
    with ExitStack() as stack:
        crowd = [stack.enter_context(raw(server)) for _ in range(1200)]
        for sock in crowd:
            sock.sendall(HELLO)
        for sock in crowd:
            assert sock.recv(100) == wire.encode(Code.WELCOME)
            sock.sendall(request)
        begun = time.monotonic()
        store.set("go", "1")
        for sock in crowd:
            assert sock.recv(100) == wire.encode(Code.OK)
        assert time.monotonic() - begun < PROMPTLY


def test_running_out_of_descriptors_harms_only_who_comes_then() -> None:
    program = """
        import resource
        from tilework.store import server as module
        module._raise_descriptor_limit = lambda: None
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        server = StoreServer.listen_tcp("127.0.0.1", 0)
        server.start()
        print(server.port, flush=True)
        time.sleep(60)
    """
    with process(program) as server, ExitStack() as stack:
        port = int(server.line())
        store = stack.enter_context(TCPStore("127.0.0.1", port))
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        store.set("k", "v")
        for sock in crowd:
            sock.close()
        with TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120)) as late:
            assert late.get("k") == b"v"


def test_those_that_never_greet_leave_room_for_clients() -> None:
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        server = StoreServer.listen_tcp("127.0.0.1", 0)
        server.start()
        print(server.port, flush=True)
        time.sleep(60)
    """
    with process(program) as server, ExitStack() as stack:
        address = ("127.0.0.1", int(server.line()))
        store = stack.enter_context(TCPStore(*address))
        idle = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(400)]
        clients = [stack.enter_context(TCPStore(*address)) for _ in range(80)]
        store.set("k", "v")
        assert {client.get("k") for client in clients} == {b"v"}
        assert hangs_up(idle[0])
        idle[-1].sendall(HELLO)
        assert idle[-1].recv(100) == wire.encode(Code.WELCOME)


def test_a_blocked_thread_does_not_stop_the_others_of_its_store(store: TCPStore) -> None:
    calls = [Background(lambda: store.get("go")) for _ in range(20)]
    time.sleep(0.05)
    assert store.add("n", 1) == 1
    store.set("go", "v")
    assert [call.result() for call in calls] == [b"v"] * 20


def test_many_large_values_exceed_a_message_and_come_anyway(store: TCPStore) -> None:
    keys = [f"{n}" for n in range(5)]
    store.multi_set(keys, [b"x" * 15_000_000] * 5)
    assert [len(value) for value in store.multi_get(keys)] == [15_000_000] * 5


# Secrets.


@pytest.fixture(params=["tcp", "unix"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Callable[[bytes | None], object]]:
    """A way to connect to a server that has a secret."""
    name = f"@tilework-test-{uuid.uuid4().hex}"
    listen = (
        StoreServer.listen_tcp("127.0.0.1", 0, SECRET)
        if request.param == "tcp"
        else StoreServer.listen_unix(name, SECRET)
    )
    with listen as server:
        server.start()
        yield (
            lambda secret: (
                UnixStore(name, secret=secret)
                if server.port == 0
                else TCPStore("127.0.0.1", server.port, secret=secret)
            )
        )


def test_a_wrong_secret_is_refused(guarded: Callable[[bytes | None], object]) -> None:
    with pytest.raises(DistNetworkError, match="refused this client: its secret is wrong"):
        guarded(SECRET + b"x")


def test_a_missing_secret_is_refused(guarded: Callable[[bytes | None], object]) -> None:
    with pytest.raises(DistNetworkError, match="requires the job's secret"):
        guarded(None)


def test_a_server_without_the_secret_is_refused(server: StoreServer) -> None:
    with pytest.raises(DistNetworkError, match="could not prove that it knows the secret"):
        TCPStore("127.0.0.1", server.port, secret=SECRET)


def test_a_server_that_only_pretends_is_refused() -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(wire.encode(Code.CHALLENGE, (bytes(32),)))
        sock.recv(1000)
        sock.sendall(wire.encode(Code.WELCOME, (bytes(32),)))

    with (
        fake_server(answer) as port,
        pytest.raises(DistNetworkError, match="could not prove"),
    ):
        TCPStore("127.0.0.1", port, secret=SECRET)


def test_the_secret_does_not_travel() -> None:
    heard = []

    def answer(sock: socket.socket) -> None:
        heard.append(sock.recv(1000))
        sock.sendall(wire.encode(Code.CHALLENGE, (bytes(32),)))
        heard.append(sock.recv(1000))

    with fake_server(answer) as port, pytest.raises(DistNetworkError):
        TCPStore("127.0.0.1", port, secret=SECRET, timeout=SHORT)
    assert len(heard) >= 2
    assert SECRET not in b"".join(heard)


def test_requests_need_the_proof() -> None:
    with StoreServer.listen_tcp("127.0.0.1", 0, SECRET) as server:
        server.start()
        with raw(server) as sock:
            sock.sendall(HELLO)
            sock.recv(100)
            sock.sendall(wire.encode(Code.NUM_KEYS))
            assert hangs_up(sock)


@pytest.mark.parametrize(("secret", "error"), [("text", TypeError), (b"", ValueError)])
def test_a_secret_is_some_bytes(secret: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="secret"):
        TCPStore("127.0.0.1", 0, is_master=True, secret=secret)


def test_only_who_proved_something_is_authenticated() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as plain:
        assert not plain.authenticated
    with TCPStore("127.0.0.1", 0, is_master=True, secret=SECRET) as proven:
        assert proven.authenticated
    with UnixStore(f"@tilework-test-{uuid.uuid4().hex}", is_master=True) as local:
        assert local.authenticated


def test_what_keys_may_follow_from() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as plain:
        assert plain.secret is None
    with TCPStore("127.0.0.1", 0, is_master=True, secret=SECRET) as proven:
        assert PrefixStore("a", PrefixStore("b", proven)).secret == proven.secret == SECRET
        assert SECRET.decode() not in repr(proven)
    assert HashStore().secret is None


def test_another_user_is_refused_on_a_unix_socket() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    program = """
        os.setuid(65534)
        try:
            UnixStore(sys.argv[1])
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        import socket, tilework.store.address as address
        address.UnixAddress.refuses = lambda self, peer: ""
        try:
            UnixStore(sys.argv[1])
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    """
    name = f"@tilework-test-{uuid.uuid4().hex}"
    with UnixStore(name, is_master=True), process(program, name) as stranger:
        assert "DistNetworkError" in (client_says := stranger.line())
        assert "cannot be trusted: it belongs to user 0" in client_says
        assert "refused this client: it belongs to user 65534" in stranger.line()


# Addresses.


def test_a_waiting_time_out_is_the_servers() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        begun = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            store.wait(["k"], timedelta(seconds=0.25))
        assert 0.25 <= time.monotonic() - begun < PROMPTLY
