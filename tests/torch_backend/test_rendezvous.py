"""Programs started by tilework run, torchrun and torch's own spawn find their group."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch.distributed as torch_dist

import tilework
import tilework.torch_backend
from tests.warm_python import run_warm
from tilework.comm.backend import core_error

pytestmark = pytest.mark.skipif(core_error() is not None, reason=str(core_error()))

SOURCES = Path(tilework.__file__ or "").parent.parent
PROGRAM = """
import torch
import torch.distributed as dist
import tilework.torch_backend

dist.init_process_group({backend!r})
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
dist.destroy_process_group()
dist.init_process_group("tilework")  # once more, where the ranks met before
dist.all_reduce(x, group=dist.new_group())
print(f"{{dist.get_backend()}} {{x.item():g}}", flush=True)
{end}
"""
#: Nobody but rank 0 serves the store here. It does so until both ranks are through: torch ends the
#: server with the group, and a rank that is quick to meet again would meet the server that ends.
SPAWN = """
import torch.multiprocessing as mp

def main(rank):
    import os
    import torch.distributed as dist
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    store = dist.TCPStore("127.0.0.1", {port}, is_master=rank == 0, multi_tenant=True)
    {program}
    store.set("through", "") if rank else store.wait(["through"])

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


def run(folder: Path, text: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(text)
    variables = ("MASTER_ADDR", "MASTER_PORT", "TILEWORK_STORE", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    return run_warm(
        *launcher,
        str(path),
        cwd=folder,
        env={**environment, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""], ids=["destroyed", "left"])
def test_tilework_run(tmp_path: Path, end: str) -> None:
    text = PROGRAM.format(backend="tilework", end=end)
    done = run(tmp_path, text, "-m", "tilework.cli", "run", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tilework 6") == 2


def test_a_library_that_takes_a_free_port_in_each_rank(tmp_path: Path) -> None:
    takes = """
import os, socket
from tilework.torch_backend.rendezvous import install_env_rendezvous
install_env_rendezvous()  # the import did it where this process was made
with socket.create_server(("127.0.0.1", 0)) as listener:
    os.environ.setdefault("MASTER_PORT", str(listener.getsockname()[1]))
"""
    text = takes + PROGRAM.format(backend="tilework", end="dist.destroy_process_group()")
    done = run(tmp_path, text, "-m", "tilework.cli", "run", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tilework 6") == 2


def test_torchrun(tmp_path: Path) -> None:
    text = PROGRAM.format(backend="cpu:tilework,cuda:gloo", end="dist.destroy_process_group()")
    done = run(tmp_path, text, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tilework 6") == 2


def test_spawned(tmp_path: Path) -> None:
    program = PROGRAM.format(backend="tilework", end="dist.destroy_process_group()")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = run(tmp_path, SPAWN.format(program=program.replace("\n", "\n    "), port=port))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tilework 6") == 2


def test_a_launcher_that_gives_no_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TILEWORK_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # as `accelerate launch --cpu` does, alone
    with pytest.raises(ValueError, match=r"RANK .* is not set\. Start .* with `tilework run`"):
        torch_dist.init_process_group("tilework")


def test_one_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    end = "if dist.get_rank(): raise SystemExit('out of data')\ndist.barrier()"
    text = PROGRAM.format(backend="tilework", end=end)
    done = run(tmp_path, text, "-m", "tilework.cli", "run", "-n", "2")
    assert done.returncode
    assert "out of data" in done.stderr
