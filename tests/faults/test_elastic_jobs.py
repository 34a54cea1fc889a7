"""``tilework run`` with ranks that die: the job goes on, and the report says what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm_python import run_warm

PROGRAM = """
import json, os, signal, sys, time
from datetime import timedelta
import torch
import tilework.distributed as dist
from tilework.parallel import Resilient

SEAT, AGAIN = int(os.environ["RANK"]), "TILEWORK_REJOIN" in os.environ
WHAT = json.loads(sys.argv[1])
dist.init_process_group()


def build():
    return {"w": torch.zeros(4)}


def step(state, number):
    if not AGAIN and WHAT.get(str(SEAT)) == number:
        os.kill(os.getpid(), getattr(signal, WHAT["how"]))
    gradient = torch.full((4,), (dist.get_rank() + 1.0) / dist.get_world_size())
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    state["w"] += number
    return state["w"][0].item()


loop = Resilient(build, step)
numbers = []
for number, value in loop.run(10**9):
    assert value == number * (number + 1) / 2
    numbers.append(number)
    if number >= 20 and dist.get_world_size() == WHAT["size"]:
        break
    time.sleep(0.02)
assert numbers == list(range(numbers[0], numbers[-1] + 1))
assert AGAIN or numbers[0] == 0
if WHAT["size"] == 3:  # all ranks are there again, and can make another group
    dist.destroy_process_group()
    dist.init_process_group(timeout=timedelta(seconds=120))
    dist.barrier()
print(json.dumps({"seat": SEAT, "rank": dist.get_rank(), "size": dist.get_world_size()}))
"""


def job(tmp_path: Path, *options: str, **what: object) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    return run_warm(
        "-m", "tilework", "run", "-n", "3", *options, str(script), json.dumps(what), cwd=tmp_path
    )


def told(out: str) -> list[dict[str, int]]:
    lines = [json.loads(line.partition("] ")[2]) for line in out.splitlines()]
    return sorted(lines, key=lambda line: line["seat"])


def test_a_killed_rank_is_started_again_and_rejoins(tmp_path: Path) -> None:
    done = job(tmp_path, "--restarts", "1", how="SIGKILL", size=3, **{"0": 3})
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [{"seat": s, "rank": s, "size": 3} for s in range(3)]
    report = done.stderr[done.stderr.index("ranks came and went:") :]
    for line in (
        r"\d s +0  SIGKILL",
        r"\d s +0  started again \(1 of 1 restarts\)",
        r"the group continues with ranks 1, 2",
        r"training continues after step 3, \d+ ms later",
        r"let in; the group has ranks 0, 1, 2",
    ):
        assert re.search(line, report), report


def test_the_job_goes_on_smaller(tmp_path: Path) -> None:
    done = job(tmp_path, "--elastic", "2:3", how="SIGKILL", size=2, **{"1": 3})
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [
        {"seat": 0, "rank": 0, "size": 2},
        {"seat": 2, "rank": 1, "size": 2},
    ]
    assert "the group continues with ranks 0, 2" in done.stderr


STOPPED = """
import os, signal
from datetime import timedelta
import torch
import tilework.distributed as dist
from tilework.parallel import Resilient
from tilework.parallel.resilient import training_loop

dist.init_process_group()
seat, shrink = dist.get_rank(), training_loop.shrink_group


def stop_or_shrink(**options):
    if seat == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return shrink(**options)


def step(state, number):
    if seat == 1 and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(state["w"])


training_loop.shrink_group = stop_or_shrink
loop = Resilient(lambda: {"w": torch.zeros(4)}, step, patience=timedelta(seconds=0.5))
print(len(list(loop.run(6))), dist.get_world_size())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_job_that_others_finish_without_a_stopped_rank_has_not_failed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    done = run_warm("-m", "tilework", "run", "-n", "3", "--elastic", "1:3", str(script))
    assert done.stdout == "[0] 6 1\n", done.stderr
    assert "2  ended: the others have finished without it" in done.stderr
    assert done.returncode == 0, done.stderr


UNSTEADY = """
import os, signal, sys
from pathlib import Path
import torch
import tilework.distributed as dist
from tilework.parallel import Resilient

seat, what = os.environ["RANK"], dict(word.split("=") for word in sys.argv[1:])
if what.get("early") == seat and not Path("ended").exists():
    Path("ended").touch()
    os._exit(7)
dist.init_process_group()


def step(state, number):
    if what.get(f"step{number}") == seat:
        os.kill(os.getpid(), signal.SIGKILL if number == 2 else signal.SIGUSR2)
    dist.all_reduce(state["w"])


print(len(list(Resilient(lambda: {"w": torch.zeros(4)}, step).run(6))), dist.get_world_size())
"""


def unsteady(tmp_path: Path, options: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(UNSTEADY)
    command = ["-m", "tilework", "run", "-n", "3", *options, str(script), *words]
    return run_warm(*command, cwd=tmp_path)


def test_a_rank_that_ends_before_it_has_come_is_started_again(tmp_path: Path) -> None:
    done = unsteady(tmp_path, ["--restarts", "1"], "early=1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 6 3", "[1] 6 3", "[2] 6 3"]
    assert re.search(r"1  exit code 7\n.*1  started again", done.stderr), done.stderr


def test_the_rank_that_brings_a_job_below_its_least_is_to_blame(tmp_path: Path) -> None:
    done = unsteady(tmp_path, ["--elastic", "2:3"], "step2=0", "step4=2")
    assert done.returncode == 128 + signal.SIGUSR2, done.stderr
    assert done.stderr.count("rank 0 failed: SIGKILL") == 1
    assert done.stderr.count("rank 2 failed: SIGUSR2") == 1


def test_without_options_a_death_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nos.environ['RANK'] == '1' and os._exit(3)\ntime.sleep(60)")
    done = run_warm("-m", "tilework", "run", "-n", "2", str(script))
    assert done.returncode == 3
    assert "ranks came and went" not in done.stderr


TERM = """
import signal, sys, time
import torch
import tilework.distributed as dist
from tilework.parallel import Resilient

dist.init_process_group()


class Checkpoints:
    def save(self, step, state):
        time.sleep(3)
        print("saved", step, int(state["w"].item()), flush=True)

    def resume(self, into):
        return None

    def should_save(self, step):
        return False

    def wait(self):
        pass


def step(state, number):
    state["w"] += 1
    time.sleep(0.02)
    if number == 3 and dist.get_rank() == 0:
        print("running", flush=True)


loop = Resilient(lambda: {"w": torch.zeros(1)}, step, checkpoint=Checkpoints())
for _ in loop.run(10**9):
    pass
print("ended by", loop.stopped, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_sigterm_saves_a_last_checkpoint_and_ends_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TERM)
    command = [sys.executable, "-m", "tilework", "run", "-n", "2", "--grace", "30", str(script)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "running" in first
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=180)
    lines = sorted(line.partition("] ")[2] for line in out.splitlines())
    assert len(lines) == 4, err
    assert lines[:2] == ["ended by SIGTERM"] * 2
    saved = re.fullmatch(r"saved (\d+) (\d+)", lines[2])
    assert saved is not None
    assert lines[2] == lines[3]
    assert saved[1] == saved[2]
    assert process.returncode == 128 + signal.SIGTERM
