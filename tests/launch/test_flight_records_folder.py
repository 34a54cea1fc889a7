"""``tilework run`` collects its ranks' flight records, and says where they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, wait_for_files, wait_until
from tilework.launch.flight_records import FlightFolder, read_latest_run

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no such signals here")


@pytest.fixture
def temporary(launch: Launch, tmp_path: Path) -> Path:
    """Where the job makes temporary files; the real torch is loaded."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    launch.environment["TMPDIR"] = str(folder)
    launch.environment.pop("TILEWORK_FLIGHT_DIR", None)
    launch.with_torch()
    return folder


HANG = """
    import time
    from datetime import timedelta
    import tilework.distributed as dist

    def load():
        while True:
            time.sleep(1)

    dist.init_process_group()
    dist.barrier()
    dist.get_default_group().set_timeout(timedelta(seconds=1))
    if dist.get_rank() == 1:
        load()
    dist.barrier()
    """


def test_after_a_failure_everybody_has_told(launch: Launch, temporary: Path) -> None:
    done = launch(HANG)
    assert done.status == 1
    (told,) = re.findall(r"who waited for whom: tilework explain (\S+) \(records of 2", done.err)
    assert Path(told).parent == temporary
    assert os.stat(told).st_mode & 0o077 == 0
    records = read_latest_run(Path(told)).records
    # Rank 1 has noticed nothing: it was asked before it was ended.
    assert records[1].faults == ()
    assert records[1].stacks[0].site.endswith(" in load")


def test_where_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"TILEWORK_FLIGHT_DIR": "mine"}
    # Ranks may change their folder, so the path is whole.
    assert FlightFolder.choose(Path("logs"), named) == FlightFolder(tmp_path / "mine", False)
    assert FlightFolder.choose(Path("logs"), {}).path == tmp_path / "logs" / "flight"
    one, other = FlightFolder.choose(None, {}), FlightFolder.choose(None, {})
    assert one.temporary
    assert one.path != other.path
    assert not one.path.exists()  # the first rank that needs it makes it


def test_sigusr1_to_the_launcher(launch: Launch, temporary: Path) -> None:
    script = launch.script("""
        import os, time
        import tilework.distributed as dist

        dist.init_process_group()
        dist.barrier()
        open(f"ready-{dist.get_rank()}", "w").write("yes")
        while not os.path.exists("go"):
            time.sleep(0.01)
        dist.barrier()
        print("unharmed")
        """)
    process = launch.start("-n", "2", script)
    assert wait_until(lambda: len(list(launch.folder.glob("ready-*"))) == 2, seconds=180)
    process.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: len(list(temporary.glob("tilework-flight-*/rank-?.json"))) == 2)
    (launch.folder / "go").touch()
    done = launch.finish(process)
    assert (done.status, done.lines) == (0, ["[0] unharmed", "[1] unharmed"])
    (folder,) = temporary.glob("tilework-flight-*")
    assert done.err == f"tilework: ranks write their flight records to {folder}\n"
    assert sorted(read_latest_run(folder).records) == [0, 1]


def test_what_nobody_was_told_of_is_removed(launch: Launch, temporary: Path) -> None:
    done = launch("""
        import torch
        import tilework.distributed as dist

        dist.init_process_group()
        try:
            dist.broadcast(torch.ones(1 + dist.get_rank()), 0)
        except dist.CollectiveMismatchError:
            print("caught")
        """)
    assert (done.status, done.lines, done.err) == (0, ["[0] caught", "[1] caught"], "")
    assert list(temporary.glob("tilework-flight-*")) == []


def test_where_nobody_waited_there_is_no_folder(launch: Launch, temporary: Path) -> None:
    done = launch("import tilework.distributed as dist; dist.init_process_group(); 1 / 0")
    assert "who waited for whom" not in done.err
    assert list(temporary.glob("tilework-flight-*")) == []


def test_old_folders_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new, other = (
        tmp_path / name
        for name in (f"tilework-flight-{'0' * 16}", f"tilework-flight-{'1' * 16}", "others")
    )
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (1, 1))
    FlightFolder.choose(None, {}).close()
    assert sorted(tmp_path.iterdir()) == sorted([new, other])


def ready(launch: Launch, *handler: str) -> subprocess.Popen[bytes]:
    """A rank with a handler of its own for SIGUSR1, or none."""
    lines = ["import os, signal, sys, time", *handler]
    loop = ["open('ready', 'w').write('yes')", "while not os.path.exists('go'): time.sleep(0.01)"]
    process = launch.start("-n", "1", launch.script("\n".join([*lines, *loop])))
    wait_for_files(launch.folder, "ready", 1)
    return process


def test_a_programs_own_handler_gets_the_signal(launch: Launch) -> None:
    process = ready(launch, "signal.signal(signal.SIGUSR1, lambda *_: open('go', 'w'))")
    process.send_signal(signal.SIGUSR1)
    assert launch.finish(process).status == 0


def test_a_program_that_would_die_of_the_signal_is_spared(launch: Launch) -> None:
    process = ready(launch, "signal.signal(signal.SIGUSR1, signal.SIG_DFL)")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    (launch.folder / "go").touch()
    assert launch.finish(process).status == 0


def test_files_of_before_are_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlightFolder, "_explains", lambda self: True)
    (tmp_path / "rank-0.json").write_text("{}")
    os.utime(tmp_path / "rank-0.json", (1, 1))
    folder = FlightFolder.choose(None, {"TILEWORK_FLIGHT_DIR": str(tmp_path)})
    assert folder.announce() == ""
    (tmp_path / "rank-1.json").write_text("{}")
    assert folder.announce().endswith(f"tilework explain {tmp_path} (records of 1 rank)")
    folder.close()
    assert len(os.listdir(tmp_path)) == 2
