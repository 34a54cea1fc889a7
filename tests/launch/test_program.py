"""What runs is as if Python itself had run it, whichever way ranks start."""

from __future__ import annotations

import gzip
import os
import signal
import zipapp

from tests.launch.conftest import Launch


def test_script_sees_what_python_shows_it(launch: Launch, start: str) -> None:
    done = launch(
        """
        import sys
        print(sys.argv, __name__, __file__, sys.path[0])
        """,
        "--start",
        start,
        arguments=("--lr", "1", "-n", "3"),
    )
    folder = launch.folder.resolve()
    seen = f"['script.py', '--lr', '1', '-n', '3'] __main__ {folder}/script.py {folder}"
    assert (done.status, done.err) == (0, "")
    assert done.lines == [f"[0] {seen}", f"[1] {seen}"]


def test_script_in_a_folder_finds_its_neighbours(launch: Launch) -> None:
    launch.script("value = 7", "inner/neighbour.py")
    launch.script("import neighbour; print(neighbour.value)", "inner/main.py")
    done = launch.finish(launch.start("-n", "1", "inner/main.py"))
    assert (done.out, done.err) == ("7\n", "")


def test_module(launch: Launch) -> None:
    launch.script("", "package/__init__.py")
    launch.script("import sys; print(__spec__.name, __package__, sys.argv[1:])", "package/part.py")
    done = launch.finish(launch.start("-n", "1", "-m", "package.part", "-m", "x"))
    assert (done.status, done.out) == (0, "package.part package ['-m', 'x']\n")


def test_package_with_a_main_module(launch: Launch) -> None:
    launch.script("", "package/__init__.py")
    launch.script("import sys; print(sys.argv[0], __name__)", "package/__main__.py")
    done = launch.finish(launch.start("-n", "1", "-m", "package"))
    assert done.out == f"{launch.folder.resolve()}/package/__main__.py __main__\n"


def test_package_without_a_main_module(launch: Launch) -> None:
    launch.script("", "package/__init__.py")
    done = launch.finish(launch.start("-n", "1", "-m", "package"))
    assert done.status == 1
    assert "'package' is a package without a __main__ module" in done.err


def test_folder(launch: Launch) -> None:
    launch.script("import beside; print(beside.x, __name__)", "app/__main__.py")
    launch.script("x = 1", "app/beside.py")
    done = launch.finish(launch.start("-n", "1", "app"))
    assert (done.out, done.err) == ("1 __main__\n", "")


def test_archive_with_a_line_for_the_shell(launch: Launch) -> None:
    launch.script("import beside; print(beside.x, __name__)", "app/__main__.py")
    launch.script("x = 1", "app/beside.py")
    archive = launch.folder / "app.pyz"
    zipapp.create_archive(launch.folder / "app", archive, "/usr/bin/env python3")
    done = launch.finish(launch.start("-n", "1", str(archive)))
    assert (done.out, done.err) == ("1 __main__\n", "")


def test_threads_that_outlive_the_script_find_its_classes(launch: Launch, start: str) -> None:
    done = launch(
        """
        import pickle, threading, time
        class Model: pass
        def save():
            time.sleep(0.1)
            print(type(pickle.loads(pickle.dumps(Model()))).__name__)
        threading.Thread(target=save).start()
        """,
        "--start",
        start,
    )
    assert (done.lines, done.err) == (["[0] Model", "[1] Model"], "")


def test_exit_handlers_run_and_open_files_are_written(launch: Launch, start: str) -> None:
    launch(
        """
        import atexit, gzip, os, tempfile
        rank = os.environ["RANK"]
        plain, packed = open(f"plain-{rank}", "w"), gzip.open(f"packed-{rank}", "wt")
        print("text", file=plain), print("text", file=packed)
        folder = tempfile.TemporaryDirectory(dir=".")
        atexit.register(lambda: open(f"handler-{rank}", "w").write("ran"))
        """,
        "--start",
        start,
    )
    assert {(launch.folder / f"plain-{rank}").read_text() for rank in range(2)} == {"text\n"}
    assert gzip.decompress((launch.folder / "packed-1").read_bytes()) == b"text\n"
    assert (launch.folder / "handler-0").read_text() == "ran"
    assert not list(launch.folder.glob("tmp*"))


def test_rank_0_reads_stdin_and_others_read_nothing(launch: Launch) -> None:
    name = launch.script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    reader, writer = os.pipe()
    os.write(writer, b"some input")
    os.close(writer)
    process = launch.start("-n", "2", name, stdin=reader)
    os.close(reader)
    assert launch.finish(process).lines == ["[0] 0 'some input'", "[1] 1 ''"]


def test_source_is_found_after_the_script_has_moved_away(launch: Launch) -> None:
    done = launch("import os; os.chdir('/'); 1 / 0", "-n", "1")
    assert "import os; os.chdir('/'); 1 / 0\n" in done.err


def test_works_with_standard_descriptors_closed(launch: Launch) -> None:
    name = launch.script("import os; open(os.environ['RANK'], 'w').write('ran')")

    def close_them() -> None:
        os.closerange(0, 3)

    process = launch.start("-n", "2", name, preexec_fn=close_them)
    assert launch.finish(process).status == 0
    assert (launch.folder / "1").read_text() == "ran"


def test_ranks_have_default_signal_handlers(launch: Launch, start: str) -> None:
    done = launch(
        """
        import signal
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP", "SIGWINCH")
        print([signal.getsignal(getattr(signal, n)) in
               (signal.SIG_DFL, signal.default_int_handler) for n in names],
              signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        """,
        "--start",
        start,
        "-n",
        "1",
    )
    assert done.out == f"{[True] * 5} set()\n"


def test_what_was_ignored_stays_ignored(launch: Launch) -> None:
    name = launch.script("import signal; print(signal.getsignal(signal.SIGHUP).name)")
    process = launch.start(
        "-n", "1", name, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert launch.finish(process).out == "SIG_IGN\n"


def test_nothing_is_seeded(launch: Launch) -> None:
    launch.with_torch()
    done = launch("import numpy as np, random; print(random.random(), np.random.rand())")
    first, second = (line.split()[1:] for line in done.lines)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_child_of_a_rank_is_no_rank(launch: Launch) -> None:
    done = launch(
        """
        import os, sys
        if os.fork() == 0:
            raise ValueError("in the child")
        os.wait()
        """,
        "-n",
        "1",
    )
    assert done.status == 0
    assert "ValueError: in the child" in done.err
    assert "rank 0 failed" not in done.err


def test_ranks_inherit_no_descriptors_of_the_launcher(launch: Launch, start: str) -> None:
    done = launch(
        """
        import os
        names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        print(*sorted(os.readlink(name).split(":")[0] for name in names if os.path.exists(name)))
        """,
        "-n",
        "3",
        "--start",
        start,
    )
    # Standard ones, the pipe for last words, and both ends of the flight record's.
    assert done.lines == [f"[{rank}] /dev/null{' pipe' * 5}" for rank in range(3)]
