"""The protocol's bytes, without sockets."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilework.framed import GarbageError
from tilework.store import wire
from tilework.store.wire import Code, Inbox

FIELDS = st.lists(st.binary(max_size=20), max_size=5)


@given(st.sampled_from(list(Code)), FIELDS, st.integers(1, 7))
def test_a_message_arrives_in_pieces_of_any_size(code: Code, fields: list[bytes], n: int) -> None:
    data, inbox = wire.encode(code, fields), Inbox()
    pieces = [data[at : at + n] for at in range(0, len(data), n)]
    messages = [inbox.feed(piece) for piece in pieces]
    assert messages[:-1] == [None] * (len(pieces) - 1)
    assert messages[-1] == (code, fields)


@given(FIELDS, FIELDS)
def test_an_inbox_can_be_used_again(first: list[bytes], second: list[bytes]) -> None:
    inbox = Inbox()
    for fields in (first, second):
        data = wire.encode(Code.OK, fields)
        assert inbox.feed(data[:3]) is None
        assert inbox.feed(data[3:]) == (Code.OK, fields)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_are_a_message_or_garbage(pieces: list[bytes]) -> None:
    inbox = Inbox()
    try:
        for piece in filter(None, pieces):
            inbox.feed(piece)
    except GarbageError:
        pass


def test_a_size_above_the_limit_is_refused_with_the_header() -> None:
    with pytest.raises(GarbageError, match="limit 100"):
        Inbox(100).feed(struct.pack("!IB", 101, Code.SET))


def test_bytes_after_a_message_are_refused() -> None:
    with pytest.raises(GarbageError, match="after the end"):
        Inbox().feed(wire.encode(Code.OK) + b"\0")


@pytest.mark.parametrize("body", [b"\0", b"\0\0\0\1", b"\xff\xff\xff\xffx", b"\0\0\0\1ab"])
def test_fields_that_do_not_add_up_are_refused(body: bytes) -> None:
    with pytest.raises(GarbageError):
        wire.decode_fields(body)


def test_too_many_fields_are_refused() -> None:
    assert len(wire.decode_fields(bytes(4) * wire.MAX_FIELDS)) == wire.MAX_FIELDS
    with pytest.raises(GarbageError):
        wire.decode_fields(bytes(4) * (wire.MAX_FIELDS + 1))


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match=f"at most {wire.MAX_MESSAGE_BYTES}"):
        wire.encode(Code.SET, [b"k", bytes(wire.MAX_MESSAGE_BYTES)])


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=30))
def test_groups_are_kept_whole_and_in_order(groups: list[tuple[bytes, ...]]) -> None:
    runs = wire.fit_into_messages(groups)
    assert [field for run in runs for field in run] == [
        field for group in groups for field in group
    ]
    assert len(runs) == 1


def test_large_groups_are_spread_over_messages() -> None:
    half = bytes(wire.MAX_MESSAGE_BYTES // 2)
    assert [len(run) for run in wire.fit_into_messages([(half,)] * 3)] == [1, 1, 1]
    assert [len(run) for run in wire.fit_into_messages([(b"",)] * 70_000)] == [65528, 4472]


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_come_back(number: int) -> None:
    assert wire.decode_number(wire.encode_number(number)) == number


def test_a_proof_depends_on_secret_side_and_nonces() -> None:
    variants = [
        wire.proof(secret, side, nonces)
        for secret in (b"a", b"b")
        for side in (b"client", b"server")
        for nonces in ((b"1", b"2"), (b"2", b"1"))
    ]
    assert len(set(variants)) == len(variants)
