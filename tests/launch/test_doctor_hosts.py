"""The doctors of several hosts: what differs, what cannot be reached, what is slow."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

from tests.hosts import two_hosts, why_no_hosts
from tilework.comm.backend import core_error
from tilework.launch import doctor_hosts
from tilework.launch.doctor_hosts import (
    LinkFigures,
    compare_versions,
    doctor_of_hosts,
    judge_links,
    rounds_of,
)


def facts(name: str, **other: str) -> dict[str, object]:
    versions = {"tilework": "1", "headers": "ab", "torch": "2", "Python": "3.11"}
    return {"name": name, "address": f"10.0.0.{ord(name)}", **versions, **other}


@pytest.mark.parametrize("size", range(2, 10))
def test_each_pair_meets_once_and_nobody_twice_at_a_time(size: int) -> None:
    rounds = list(rounds_of(size))
    met = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(size), 2))
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)


def test_a_host_with_another_version_is_named() -> None:
    lines = compare_versions([facts("a"), facts("b", torch="3"), facts("c")])
    assert [line.value for line in lines if line.state == "bad"] == ["2, but 1 b 3"]


def test_clocks_ports_and_slow_links_are_named() -> None:
    links = [
        LinkFigures(0, 1, trip=1e-4, rate=1e8),
        LinkFigures(0, 2, "timed out"),
        LinkFigures(1, 2, trip=1e-4, rate=1e8, clock=7200.0),
        LinkFigures(2, 1, trip=1e-4, rate=1e6),
    ]
    lines = judge_links([facts("a"), facts("b"), facts("c")], links)
    bad = {line.name: f"{line.value}; {line.note}" for line in lines if line.state == "bad"}
    assert list(bad) == ["0 a → 2 c", "1 b → 2 c", "2 c → 1 b"]
    assert "timed out; open all ports" in bad["0 a → 2 c"]
    assert "the clock of 2 c is 2.0 hours ahead of that of 1 b" in bad["1 b → 2 c"]
    assert "far worse" in bad["2 c → 1 b"]


def test_a_host_that_does_not_come_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TILEWORK_SECRET", raising=False)
    monkeypatch.setattr(doctor_hosts, "_PATIENCE_SECONDS", 0.3)
    assert doctor_of_hosts("127.0.0.1", 29873, 2) == 1
    assert "1 of 2 hosts came" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
def test_doctors_of_two_hosts() -> None:
    why_not = why_no_hosts()
    if why_not is not None:
        pytest.skip(why_not)
    with two_hosts(mbit=400) as hosts:
        command = [sys.executable, "-m", "tilework.cli", "doctor"]
        command += ["--rdzv", f"{hosts[0].address}:29500", "--nnodes", "2"]
        started = [
            subprocess.Popen(command, preexec_fn=h.enter, stdout=subprocess.PIPE, text=True)
            for h in hosts
        ]
        told = [each.communicate(timeout=200)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], told
    assert all("by hybrid" in text and "Mbit/s" in text for text in told)
