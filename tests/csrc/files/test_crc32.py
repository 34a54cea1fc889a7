"""The core's checksum against zlib's."""

from __future__ import annotations

import ctypes
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import each
from tilework import _core


@each("nbytes", [0, 1, 7, 16, 127, 128, 129, 255, 1023, 1024, 1025, 4099, 70000])
def test_lengths_at_which_the_way_changes(nbytes: int) -> None:
    data = bytes(i * 7919 % 251 for i in range(nbytes))
    memory = ctypes.create_string_buffer(data, max(nbytes, 1))
    assert _core.crc32(ctypes.addressof(memory), nbytes) == zlib.crc32(data)


@settings(max_examples=40)
@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1), st.integers(0, 15))
def test_any_bytes_after_any_others(data: bytes, crc: int, shift: int) -> None:
    memory = ctypes.create_string_buffer(b"x" * shift + data)
    found = _core.crc32(ctypes.addressof(memory) + shift, len(data), crc)
    assert found == zlib.crc32(data, crc)
