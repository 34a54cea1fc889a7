"""Sizes in few letters."""

from __future__ import annotations

from tests.tables import each
from tilework.show import bytes_text


@each(("n", "text"), [(0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")])
def test_bytes(n: int, text: str) -> None:
    assert bytes_text(n) == text
