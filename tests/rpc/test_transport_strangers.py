"""Whoever is not of the job is not heard: nothing of theirs is unpickled, let alone run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from tests.faults.forked_ranks import Holdings
from tests.rpc.joined_ranks import my_name, this_agent, together, until
from tilework import rpc
from tilework.rpc.message import MessageKind, encode
from tilework.rpc.transport import MAX_FRAME_BYTES, Keys, agree_on_keys
from tilework.store import HashStore, PrefixStore, TCPStore

_ran: list[str] = []


def harm() -> None:
    _ran.append("harm")


class _Evil:
    def __reduce__(self) -> Any:
        return harm, ()


def attack_frames() -> list[bytes]:
    """A call that does harm as it is unpickled, and as it is run."""
    job = pickle.dumps((harm, (_Evil(),), {}))
    return [bytes(frame) for frame in encode(MessageKind.CALL, 1, 7, (), [memoryview(job)])]


def address() -> str:
    """Where this rank listens."""
    bound = this_agent()._transport._inbox.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


def server_key(rank: int = 0) -> bytes:
    return this_agent()._transport._keys.public(rank)


@contextmanager
def stranger(set_up: Callable[[zmq.Socket[bytes]], None]) -> Iterator[zmq.Socket[bytes]]:
    """A socket of somebody else's, connected to this rank."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as made:
        made.set(zmq.LINGER, 0)
        made.set(zmq.SNDTIMEO, 200)
        set_up(made)
        made.connect(address())
        yield made


def no_security(made: zmq.Socket[bytes]) -> None:
    pass


def plain_password(made: zmq.Socket[bytes]) -> None:
    made.set(zmq.PLAIN_USERNAME, b"w1")
    made.set(zmq.PLAIN_PASSWORD, b"secret")


def own_keys(made: zmq.Socket[bytes]) -> None:
    """With the server's public key, which is no secret, and a pair of its own."""
    public, private = zmq.curve_keypair()
    made.set(zmq.CURVE_SERVERKEY, server_key())
    made.set(zmq.CURVE_PUBLICKEY, public)
    made.set(zmq.CURVE_SECRETKEY, private)


def another_secret(made: zmq.Socket[bytes]) -> None:
    keys = Keys(b"another job's", 2)
    made.set(zmq.CURVE_SERVERKEY, keys.public(0))
    made.set(zmq.CURVE_PUBLICKEY, keys.public(1))
    made.set(zmq.CURVE_SECRETKEY, keys.private(1))


def claimed_key(made: zmq.Socket[bytes]) -> None:
    """Says that it has a public key of the job, without the private one."""
    made.set(zmq.CURVE_SERVERKEY, server_key())
    made.set(zmq.CURVE_PUBLICKEY, server_key(1))
    made.set(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])


def attacked(attack: Callable[[], None]) -> None:
    """``attack`` rank 0 while both work; nothing must come of it."""
    _ran.clear()

    def program(rank: int) -> None:
        if rank == 0:
            attack()
            for _ in range(20):
                assert rpc.rpc_sync("w1", my_name) == "w1"
        rpc.barrier()
        assert rpc.rpc_sync("w0", my_name) == "w0"

    together(2, program)
    assert not _ran


STRANGERS = [no_security, plain_password, own_keys, another_secret, claimed_key]


@pytest.mark.parametrize("set_up", STRANGERS, ids=lambda f: f.__name__)
def test_a_strangers_call_is_not_run(set_up: Callable[[Any], None]) -> None:
    def attack() -> None:
        with stranger(set_up) as made:
            for _ in range(3):
                try:
                    made.send_multipart(attack_frames(), zmq.NOBLOCK)
                except zmq.Again:
                    break
            time.sleep(0.2)

    attacked(attack)


def test_a_member_is_heard_by_the_same_means() -> None:
    """So that the tests above could fail: with the job's keys, the same message is run."""
    _ran.clear()

    def with_the_jobs_keys(made: zmq.Socket[bytes]) -> None:
        keys = this_agent()._transport._keys
        made.set(zmq.CURVE_SERVERKEY, keys.public(0))
        made.set(zmq.CURVE_PUBLICKEY, keys.public(1))
        made.set(zmq.CURVE_SECRETKEY, keys.private(1))

    def program(rank: int) -> None:
        if rank == 0:
            with stranger(with_the_jobs_keys) as made:
                made.send_multipart(attack_frames())
                until(lambda: bool(_ran))

    together(2, program)
    assert _ran[0] == "harm"


def raw_socket() -> socket.socket:
    name = address().removeprefix("ipc://@")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(f"\0{name}")
    made.settimeout(0.05)
    return made


def _send(made: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it was closed, as it should be
        made.sendall(data)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(_Evil()),
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32),
        # A frame that claims to be longer than there is memory.
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + (1 << 62).to_bytes(8, "big"),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x02" + b"\xff" * 8 + bytes(100),
    ],
    ids=["nothing", "http", "pickle", "no security", "half a greeting", "long", "longest"],
)
def test_garbage_disturbs_nobody(bytes_sent: bytes) -> None:
    def attack() -> None:
        with raw_socket() as made:
            _send(made, bytes_sent)
            time.sleep(0.05)

    attacked(attack)


def test_random_garbage_disturbs_nobody() -> None:
    draw = random.Random(5)

    def attack() -> None:
        for _ in range(50):
            with raw_socket() as made:
                head = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
                _send(made, head[: draw.choice([0, 12, len(head)])] + draw.randbytes(200))

    attacked(attack)


def test_a_stranger_cannot_fill_the_memory() -> None:
    """It claims a frame of the most that may be, and sends more and more."""

    def attack() -> None:
        before = _resident_bytes()
        head = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
        with raw_socket() as made:
            made.setblocking(True)
            made.settimeout(1)
            _send(made, head + b"\x06" + (1 << 34).to_bytes(8, "big"))
            for _ in range(256):
                _send(made, bytes(1 << 20))
        assert _resident_bytes() - before < 3 * MAX_FRAME_BYTES

    attacked(attack)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_connections_that_never_speak_are_dropped_at_the_end() -> None:
    def program(rank: int) -> None:
        before = Holdings.now().descriptors
        if rank == 0:
            silent = [raw_socket() for _ in range(30)]
            assert rpc.rpc_sync("w1", my_name) == "w1"
            for made in silent:
                made.close()
            until(lambda: Holdings.now().descriptors <= before + 10)

    together(2, program)


# -- keys ---------------------------------------------------------------------------------------


def test_every_rank_has_keys_of_its_own_that_follow_from_the_secret() -> None:
    keys = Keys(b"one", 5)
    assert len(keys.allowed) == 5
    assert keys.allowed == Keys(b"one", 5).allowed
    assert not set(keys.allowed) & set(Keys(b"other", 5).allowed)
    assert keys.proof != Keys(b"other", 5).proof
    assert keys.private(0).decode() not in str(vars(keys))


def test_keys_differ_from_meeting_to_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_SECRET", "ab")
    proofs = set()
    for _ in range(2):
        store = HashStore()
        assert agree_on_keys(store, 2).proof == agree_on_keys(store, 2).proof
        proofs.add(agree_on_keys(store, 2).proof)
    assert len(proofs) == 2


def test_the_stores_own_secret_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows the number in the store, and all else that travels, has other keys."""
    monkeypatch.delenv("TILEWORK_SECRET", raising=False)
    with TCPStore("127.0.0.1", 0, 1, is_master=True, secret=b"of the store") as store:
        mine = agree_on_keys(PrefixStore("a", store), 2)
        assert agree_on_keys(PrefixStore("a", store), 2).proof == mine.proof
        number = store.get("a/number")
    heard = HashStore()
    heard.set("number", number)
    assert agree_on_keys(heard, 2).proof != mine.proof


def test_who_reads_the_store_but_not_the_secret_has_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWORK_SECRET", "ab" * 16)
    with TCPStore("127.0.0.1", 0, 1, is_master=True, secret=secrets.token_bytes(8)) as store:
        mine = agree_on_keys(store, 2)
        monkeypatch.setenv("TILEWORK_SECRET", "")
        assert agree_on_keys(store, 2).proof != mine.proof
