from __future__ import annotations

import secrets

import pytest

from tilework.rendezvous.liveness import ENDS_VARIABLE, EndedRanks
from tilework.store import HashStore, PrefixStore, StoreServer, UnixStore


def test_ranks_end_and_are_started_again() -> None:
    store = HashStore()
    ended, seen = EndedRanks(store), EndedRanks(PrefixStore("a", PrefixStore("b", store)))
    assert seen.among(range(9)) == set()
    for rank in (0, 3, 8):
        ended.add(rank)
    ended.remove(3)
    ended.remove(5)
    assert seen.among(range(9)) == {0, 8}
    assert seen.among([3, 8]) == {8}
    ended.remove(0)
    ended.add(3)
    assert seen.among(range(9)) == {3, 8}


def test_the_launcher_tells_at_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    name, secret = f"@tilework-test-{secrets.token_hex(8)}", secrets.token_bytes(32)
    monkeypatch.delenv(ENDS_VARIABLE, raising=False)
    for variable, value in {"RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TILEWORK_SECRET", secret.hex())
    assert EndedRanks.at_launcher(1, 3) is None
    monkeypatch.setenv(ENDS_VARIABLE, f"unix:{name}")
    with StoreServer.listen_unix(name, secret) as server:
        server.start()
        with UnixStore(name, secret=secret) as store:
            EndedRanks(store).add(2)
            told = EndedRanks.at_launcher(1, 3)
            assert told is not None
            assert told.among(range(3)) == {2}
            for other in ((0, 3), (1, 2)):  # ranks of another job within this process
                assert EndedRanks.at_launcher(*other) is None
