"""Frames in pieces of any size, and who comes in at a door."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.framed import (
    HEADER,
    MAX_CALLERS,
    Door,
    FramedSocket,
    FrameReader,
    GarbageError,
    knock,
    token_for,
)

TOKEN = b"a secret of the job"
FRAMES = st.lists(st.tuples(st.integers(1, 3), st.binary(max_size=20)), max_size=5)


@given(FRAMES, st.integers(1, 40))
def test_frames_arrive_in_pieces_of_any_size(frames: list[tuple[int, bytes]], n: int) -> None:
    data = b"".join(HEADER.pack(len(payload), kind) + payload for kind, payload in frames)
    reader = FrameReader((1, 2, 3))
    pieces = [reader.feed(data[at : at + n]) for at in range(0, len(data), n)]
    assert [frame for piece in pieces for frame in piece] == frames
    assert not reader.kept


@pytest.mark.parametrize(
    ("data", "words"),
    [(HEADER.pack(101, 1), "101 bytes, above the limit 100"), (HEADER.pack(0, 4), "kind 4")],
)
def test_foreign_frames_are_refused_with_the_header(data: bytes, words: str) -> None:
    with pytest.raises(GarbageError, match=words):
        FrameReader((1, 2, 3), 100).feed(data)


@pytest.fixture
def pair() -> Iterator[tuple[FramedSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with closing(FramedSocket(ours, (1, 2), send_seconds=0.1)) as link, theirs:
        yield link, theirs


def test_garbage_ends_a_connection(pair: tuple[FramedSocket, socket.socket]) -> None:
    link, theirs = pair
    theirs.sendall(HEADER.pack(2, 1) + b"ab" + HEADER.pack(3, 2) + b"cu")
    assert link.receive() == [(1, b"ab")]
    theirs.sendall(b"tGET / HTTP/1.1")
    assert link.receive() is None


def test_a_frame_that_is_cut_off_ends_the_connection(
    pair: tuple[FramedSocket, socket.socket],
) -> None:
    link, _ = pair
    for _ in range(20):  # nobody reads
        link.send(1, bytes(1 << 20))
    assert link.receive() is None
    with pytest.raises(ValueError, match="at most 1048576 bytes, got 1048577"):
        link.send(1, bytes((1 << 20) + 1))


def test_a_forked_child_does_not_keep_a_connection(
    pair: tuple[FramedSocket, socket.socket],
) -> None:
    link, theirs = pair
    begin, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(begin, 1)
        os._exit(0)
    link.close()
    theirs.settimeout(10.0)
    assert theirs.recv(1) == b""
    for descriptor in (begin, go):
        os.close(descriptor)
    os.waitpid(child, 0)


def let_in(door: Door) -> list[int]:
    """The numbers that come in, until nobody is awaited."""
    came, deadline = [], time.monotonic() + 60.0
    while door.awaited and time.monotonic() < deadline:
        for number, sock in door.admit(1.0).items():
            sock.close()
            came.append(number)
    return came


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_only_awaited_numbers_with_the_token_come_in(kind: socket.SocketKind) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        listener.bind("")
        listener.listen(MAX_CALLERS)
        door = stack.enter_context(closing(Door(listener, TOKEN, (1, 2))))
        for token, number in [
            (TOKEN, 7),
            (TOKEN[:-1] + b"x", 2),
            (TOKEN, 1),
            (TOKEN, 1),
            (b"", 2),
            (TOKEN[:9], 2),
            (TOKEN, 2),
        ]:
            caller = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            caller.connect(listener.getsockname())
            knock(caller, token, number)
        assert let_in(door) == [1, 2]


def test_silent_strangers_hold_nobody_up() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=600))
        door = stack.enter_context(closing(Door(listener, TOKEN, (1, 2))))
        for number in (1, None, 2):
            callers = [socket.create_connection(listener.getsockname()) for _ in range(140)]
            for caller in map(stack.enter_context, callers):
                caller.sendall(TOKEN[:3])
            if number is not None:
                knock(callers[0], TOKEN[3:], number)
        assert sorted(let_in(door)) == [1, 2]


def test_a_token_takes_the_number_and_the_secret() -> None:
    tokens = {token_for(nonce, secret) for nonce in (b"a", b"b") for secret in (None, b"c", b"d")}
    assert len(tokens) == 6
