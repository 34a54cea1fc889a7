"""What ranks write arrives whole, told apart, and in files."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Launch
from tests.launch.terminal import on_terminal

HEAVY = """
    import os, sys
    rank = os.environ["RANK"]
    for number in range(3000):
        stream = sys.stdout if number % 2 else sys.stderr
        print(rank, number, "x" * (number % 97), rank, file=stream)
"""


def test_streams_stay_apart(launch: Launch) -> None:
    done = launch("import sys; print('out'); print('err', file=sys.stderr)")
    assert done.lines == ["[0] out", "[1] out"]
    assert {line.partition("] ")[2] for line in done.err.splitlines()} == {"err"}


def test_lines_are_never_mixed(launch: Launch) -> None:
    name = launch.script(HEAVY)
    done = launch.finish(launch.start("-n", "3", name, stderr=subprocess.STDOUT))
    lines = [re.fullmatch(r"\[(\d)\] \1 (\d+) (x*) \1", line) for line in done.out.splitlines()]
    found = [(m[1], int(m[2])) for m in lines if m and len(m[3]) == int(m[2]) % 97]
    assert len(found) == len(lines) == 9000
    # One destination for both streams: then each rank's lines come in the order it wrote them.
    assert sorted(found, key=lambda pair: pair[0]) == [
        (str(rank), number) for rank in range(3) for number in range(3000)
    ]


def test_one_rank_needs_no_prefix(launch: Launch) -> None:
    assert launch("print('hello')", "-n", "1").out == "hello\n"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", ["[0] 0", "[1] 1"]),
        ("others", ["0", "[1] 1"]),
        ("none", ["0", "1"]),
    ],
)
def test_prefix_modes(launch: Launch, mode: str, expected: list[str]) -> None:
    done = launch("import os; print(os.environ['RANK'])", "--prefix", mode)
    assert done.lines == expected


def test_bytes_that_are_no_text_survive(launch: Launch) -> None:
    done = launch("import os; os.write(1, b'\\xff\\xfe\\n')", "-n", "1")
    assert done.out.encode(errors="surrogateescape") == b"\xff\xfe\n"


def test_last_line_without_newline_appears(launch: Launch) -> None:
    done = launch("import os; os.write(1, b'no end')")
    assert done.lines == ["[0] no end", "[1] no end"]


def test_lines_appear_at_once(launch: Launch) -> None:
    name = launch.script("import time; print('now'); time.sleep(60)")
    process = launch.start("-n", "1", name)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"


def test_what_a_child_of_a_rank_writes_appears(launch: Launch) -> None:
    done = launch("import subprocess; subprocess.run(['echo', 'from a child'])", "-n", "2")
    assert done.lines == ["[0] from a child", "[1] from a child"]


def test_reader_that_leaves_ends_the_job_quietly(launch: Launch) -> None:
    name = launch.script("import time\nwhile True: print('y'); time.sleep(0.001)")
    process = launch.start("-n", "2", name)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    done = launch.finish(process)
    assert (done.status, done.err) == (141, "")


def test_full_disk_is_told(launch: Launch) -> None:
    name = launch.script("import time; print('text'); time.sleep(30)")
    with open("/dev/full", "wb") as full:
        done = launch.finish(launch.start("-n", "2", name, stdout=full))
    assert done.status == 1
    assert "cannot write output: No space left on device" in done.err


def test_reader_that_pauses_holds_ranks_up_and_not_the_launcher(launch: Launch) -> None:
    name = launch.script("while True: print('x' * 1000)")
    process = launch.start("-n", "2", name)
    assert process.stdout is not None
    process.stdout.read(1)  # the ranks have begun
    stat = Path(f"/proc/{process.pid}/statm")
    time.sleep(0.7)  # enough to fill memory, if it were filled
    resident = int(stat.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 200 << 20
    process.terminate()
    assert process.wait(120) == 143


# Log files


def test_logs_hold_each_ranks_bytes(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        "import os, sys; print('out'); sys.stderr.write('err ' + os.environ['RANK'])",
        "--log-dir",
        "logs/inner",
    )
    logs = {path.name: path.read_text() for path in (tmp_path / "logs/inner").iterdir()}
    assert done.lines == ["[0] out", "[1] out"]
    assert logs == {
        "rank-0.stdout": "out\n",
        "rank-0.stderr": "err 0",
        "rank-1.stdout": "out\n",
        "rank-1.stderr": "err 1",
    }


def test_logs_hold_tracebacks(launch: Launch, tmp_path: Path) -> None:
    launch("1 / 0", "-n", "1", "--log-dir", "logs")
    assert (
        (tmp_path / "logs/rank-0.stderr")
        .read_text()
        .endswith("ZeroDivisionError: division by zero\n")
    )


def test_full_disk_ends_a_log_and_not_the_job(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-1.stdout").symlink_to("/dev/full")
    done = launch("print('text')", "--log-dir", "logs")
    assert (done.status, done.lines) == (0, ["[0] text", "[1] text"])
    assert "logs/rank-1.stdout is incomplete from here on: No space left on device" in done.err


def test_folder_for_logs_that_cannot_be_made(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = launch("print('never')", "--log-dir", "file/logs")
    assert (done.status, done.out) == (1, "")
    assert done.err == "tilework run: cannot start: 'file/logs' Not a directory\n"


# On a terminal

COLOURED = rb"\x1b\[\d+m\[%d\]\x1b\[0m "


def test_prefixes_are_coloured_on_a_terminal(launch: Launch) -> None:
    name = launch.script("import os; print('rank', os.environ['RANK'])")
    with on_terminal(launch, "-n", "3", name) as terminal:
        assert terminal.finish() == 0
        for rank in range(3):
            assert re.search(COLOURED % rank + b"rank %d\r\n" % rank, terminal.shown)


def test_no_color(launch: Launch) -> None:
    launch.environment["NO_COLOR"] = "1"
    name = launch.script("import os; print('rank', os.environ['RANK'])")
    with on_terminal(launch, "-n", "2", name) as terminal:
        terminal.finish()
        assert b"\x1b[3" not in terminal.shown
        assert b"[1] rank 1\r\n" in terminal.shown


def test_rank_0_sees_a_terminal_narrower_by_the_prefix(launch: Launch) -> None:
    name = launch.script(
        """
        import os, sys
        print(os.environ["RANK"], sys.stdout.isatty(), sys.stderr.isatty(),
              os.get_terminal_size(1).columns if sys.stdout.isatty() else 0)
        """
    )
    with on_terminal(launch, "-n", "2", name, columns=77) as terminal:
        terminal.finish()
        assert b"0 True True 73\r\n" in terminal.shown
        assert b"1 False False 0\r\n" in terminal.shown


def test_partial_lines_of_rank_0_appear_at_once_on_a_terminal(launch: Launch) -> None:
    name = launch.script("import time; print('50%', end='', flush=True); time.sleep(60)")
    with on_terminal(launch, "-n", "1", name) as terminal:
        terminal.wait_for(b"50%")
        terminal.press(b"\x03")
        assert terminal.finish() == 130


def test_rich_progress_of_rank_0_is_live(launch: Launch) -> None:
    name = launch.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            for _ in range(5):
                print("a line of rank 1"); time.sleep(0.1)
            sys.exit()
        from rich.progress import track
        for _ in track(range(5), "working"): time.sleep(0.15)
        """
    )
    with on_terminal(launch, "-n", "2", name) as terminal:
        assert terminal.finish() == 0
        shown = terminal.shown
    assert shown.count(b"working") > 2
    assert shown.count(b"a line of rank 1\r\n") == 5
    assert shown.index(b"\x1b[?25l") < shown.rindex(b"\x1b[?25h")


def test_rank_0_takes_input_from_the_terminal(launch: Launch) -> None:
    name = launch.script("import os\nif os.environ['RANK'] == '0': print('got', input('name? '))")
    with on_terminal(launch, "-n", "2", name) as terminal:
        terminal.wait_for(b"name? ")
        terminal.press(b"somebody\n")
        assert terminal.finish() == 0
        assert b"got somebody\r\n" in terminal.shown


def test_end_of_input_from_the_terminal(launch: Launch) -> None:
    name = launch.script("import sys; print('ready'); print(len(sys.stdin.read()))")
    with on_terminal(launch, "-n", "1", name) as terminal:
        terminal.wait_for(b"ready")
        terminal.press(b"abc\n\x04")
        assert terminal.finish() == 0
        assert b"4\r\n" in terminal.shown
