"""The command line: wrong use gets one clear message, and no process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

import tilework
from tilework.cli import dispatch
from tilework.comm.backend import Backend, is_backend_available
from tilework.cores import usable_cores
from tilework.launch import doctor
from tilework.launch.doctor import ReportLine
from tilework.launch.settings import KNOWN_BACKENDS, LaunchSettings


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of the complaint; the exit status is checked."""
    with pytest.raises(SystemExit) as caught:
        dispatch(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: with a script, a module and a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "train.py"], "the number of ranks must be at least 1, got '0'"),
        (["-n", "-2", "train.py"], "the number of ranks must be at least 1, got '-2'"),
        (["-n", "four", "train.py"], "must be auto or a whole number, such as 4, got 'four'"),
        (["--timeout", "0", "train.py"], "the timeout must be longer than 0 s, got '0'"),
        (["--timeout", "nan", "train.py"], "a number of seconds, such as 30 or 0.5, got 'nan'"),
        (["--timeout", "soon", "train.py"], "a number of seconds, such as 30 or 0.5, got 'soon'"),
        (["--master-port", "70000", "train.py"], "a number from 1 to 65535, got '70000'"),
        (["--restarts", "-1", "train.py"], "the number of restarts must be at least 0, got '-1'"),
        (["--elastic", "3:2", "train.py"], "such as 2:4 (1 <= MIN <= MAX), got '3:2'"),
        (["--nnodes", "0", "train.py"], "the number of nodes must be at least 1, got '0'"),
        (["--backend", "smh", "train.py"], "unknown backend 'smh': did you mean 'shm'?"),
        (["--backend", "cpu:shm,gpu:nccl", "train.py"], "unknown device type 'gpu' in backend"),
        (["--backend", "threads", "train.py"], "use 'shm'"),
        (["--start", "forkserver", "train.py"], "invalid choice: 'forkserver'"),
        (["trian.py"], "there is no file 'trian.py': did you mean 'train.py'?"),
        (["train"], "there is no file 'train': did you mean 'train.py'?"),
        (["json"], "there is no file 'json': for the module of that name use -m json"),
        (["nowhere/at/all.py"], "there is no file 'nowhere/at/all.py' (looked in"),
        (["empty"], "'empty' is a folder without a __main__.py"),
        (["-m", "train.py"], "-m takes a module's name ('train'), got 'train.py'"),
        (["-m", "no_such_module"], "there is no module 'no_such_module' here or on Python's path"),
        (["-m", "empty/x"], "there is no module 'empty/x'"),
        ([], "the following arguments are required: SCRIPT"),
        (["--bakend", "shm", "train.py"], "arguments: --bakend: did you mean --backend?"),
    ],
)
def test_wrong_use_of_run(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, "run", *arguments)


@pytest.mark.parametrize(
    ("option", "ranks"),
    [
        (["-n", "auto"], usable_cores()),
        (["--nproc-per-node", "3"], 3),
        (["--nproc_per_node=3"], 3),
        ([], usable_cores()),
    ],
)
def test_the_number_of_ranks(
    option: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(settings: LaunchSettings, program: object) -> int:
        asked.append(settings.nprocs)
        return 0

    monkeypatch.setattr("tilework.launch.command.run", run)
    assert dispatch(["run", *option, "train.py"]) == 0
    assert asked == [ranks]


def test_what_is_missing_is_named_and_what_is_optional_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(capsys, "run") == "the following arguments are required: SCRIPT"
    assert refused(capsys, "checkpoint", "show") == "the following arguments are required: PATH"


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([]) == 0
    assert "tilework COMMAND --help" in capsys.readouterr().out


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean run?" in refused(capsys, "rnu")
    assert "they are run, store, plan, doctor" in refused(capsys, "qqqqq")


def test_a_script_without_a_command_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file 'nowhere.py'" in refused(capsys, "nowhere.py")
    assert "there is no file 'nowhere.py'" in refused(capsys, "-n", "2", "nowhere.py")


def test_the_interpreter_before_a_script_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file 'nowhere.py'" in refused(capsys, "run", "python", "nowhere.py")
    text = refused(capsys, "run", "python3", "-m", "nowhere")
    assert "there is no module 'nowhere'" in text


def test_a_script_of_another_name_is_no_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("15_perm.py", "train.py"):
        (tmp_path / name).touch()
    assert "did you mean" not in refused(capsys, "run", "x_err.py")
    assert "did you mean 'train.py'" in refused(capsys, "run", "trian.py")


@pytest.mark.parametrize("command", ["run", "doctor", "explain"])
def test_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dispatch([command, "--help"])
    assert capsys.readouterr().out.count(f"  tilework {command} ") >= 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        dispatch(["--version"])
    assert capsys.readouterr().out == f"tilework {tilework.__version__}\n"


def test_help_tells_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        dispatch(["run", "--help"])
    text = capsys.readouterr().out
    options = ("-n", "--backend", "--timeout", "--log-dir", "--start", "--tcp", "--prefix", "-m")
    assert all(option in text for option in options)


def test_backends_known_to_the_launcher_are_those_there_are() -> None:
    assert {*KNOWN_BACKENDS, Backend.THREADS} <= set(Backend.backend_list)


def test_doctor_reports_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("cores", "torch", "shared-memory core", "gloo", "nccl"))
    assert text.count("passed in") == 1 + is_backend_available("shm")


def test_doctor_lists_every_backend() -> None:
    assert {finding.name for finding in doctor.backends()} == {Backend.THREADS, *KNOWN_BACKENDS}


def test_doctor_names_first_calls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_ranks", lambda *_, **__: [[(3e-4, 5e-6), (2e-2, 1e-3)]])
    (threads, *_) = doctor.self_test()
    assert threads.note == (
        "all_reduce of 8 bytes in 5 µs (the first call 300), "
        "of 4 MiB in 1,000 µs (the first call 20,000)"
    )


def test_doctor_fails_if_the_self_test_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rank: int) -> list[float]:
        raise RuntimeError(f"rank {rank} [cannot] add")

    monkeypatch.setattr(doctor, "_reduce", broken)
    assert dispatch(["doctor"]) == 1
    assert "RuntimeError: rank" in capsys.readouterr().out


def test_doctor_tells_why_the_core_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "core_error", lambda: "it was not built: install g++")
    found = {finding.name: finding for finding in [*doctor.machine(), *doctor.backends()]}
    assert found["shared-memory core"].note == "it was not built: install g++"
    assert found["shm"] == ReportLine("shm", "needs the shared-memory core", "no")
    assert found["hybrid"] == ReportLine("hybrid", "needs the shared-memory core", "no")
    assert [finding.name for finding in doctor.self_test()] == ["2 threads"]
