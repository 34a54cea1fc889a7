"""The launcher of this process, and the rank: `tilework run`, torchrun, mpirun, srun, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_Variables = Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """A launcher's settings for one rank."""

    launcher: str
    """Who set it, for messages: "tilework run", "torchrun", "mpirun", "srun", "RANK"."""
    rank: int
    """The global rank."""
    world_size: int
    """The number of ranks."""
    local_rank: int | None = None
    """Rank among those of this host; None if unknown."""
    local_world_size: int | None = None
    """How many ranks this host has; None if unknown."""
    job: str = ""
    """An identifier that all ranks of the job on a host share; empty if the launcher gives none."""
    host: str | None = None
    """Where rank 0 runs; None if unknown."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{self.launcher} gave rank {self.rank} of {self.world_size}: a rank is at "
                "least 0, and less than the world size. Check the launcher's variables in the "
                "environment."
            )

    @property
    def single_host(self) -> bool:
        """True if all ranks are known to be on this host."""
        return self.local_world_size == self.world_size


def is_torchelastic_launched() -> bool:
    """True if torchrun started this process.

    Example:
        >>> is_torchelastic_launched()
        False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def detect_environment(variables: _Variables | None = None) -> Settings | None:
    """This rank's settings in the environment; None if no launcher left any.

    Looks, in this order, for RANK and WORLD_SIZE (`tilework run`, torchrun, or by hand), Open MPI's
    mpirun, MPICH's and Intel MPI's, and SLURM's srun. Does not block.

    Args:
        variables: The environment; this process's unless given.

    Raises:
        ValueError: A variable is no number, or the rank does not fit the world size.

    Example:
        >>> detect_environment({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}).rank
        1
        >>> detect_environment({}) is None
        True
    """
    env = os.environ if variables is None else variables
    for detect in (_torch_style, _open_mpi, _hydra, _slurm, _pmi):
        settings = detect(env)
        if settings is not None:
            return settings
    return None


def integer(env: _Variables, name: str) -> int | None:
    """The integer in the environment variable ``name``, or None; raises ValueError if it is another
    text.
    """
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None


def _settings(
    env: _Variables, launcher: str, names: str, job: str = "", host: str | None = None
) -> Settings | None:
    """The settings in variables: the rank, the world size, and both on this host."""
    rank_name, size_name, *on_host = names.split()
    rank, world_size = integer(env, rank_name), integer(env, size_name)
    if rank is None or world_size is None:
        return None
    local_rank, local_size = (integer(env, name) for name in on_host)
    return Settings(launcher, rank, world_size, local_rank, local_size, job, host)


def _torch_style(env: _Variables) -> Settings | None:
    launcher = "RANK"
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif "TILEWORK_SECRET" in env:
        launcher = "tilework run"
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    return _settings(env, launcher, names, host=env.get("MASTER_ADDR"))


def _open_mpi(env: _Variables) -> Settings | None:
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    job = _first(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    return _settings(env, "mpirun", " ".join(names), job)


def _hydra(env: _Variables) -> Settings | None:
    """The settings of MPICH's or Intel's mpirun, whose ranks may see SLURM's variables; or None."""
    return _pmi(env) if "MPI_LOCALNRANKS" in env else None


def _pmi(env: _Variables) -> Settings | None:
    # Where the process manager gave the job no name: on one host all ranks have one parent.
    job = _first(env, "PMI_JOBID", "PMI_PORT") or f"child of {os.getppid()}"
    return _settings(env, "mpirun", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", job)


def _slurm(env: _Variables) -> Settings | None:
    # A batch script has some of these variables as well, but it is not one of the tasks.
    if env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env:
        return None
    rank = integer(env, "SLURM_PROCID")
    world_size = integer(env, "SLURM_STEP_NUM_TASKS") or integer(env, "SLURM_NTASKS")
    if rank is None or world_size is None:
        return None
    job = _first(env, "SLURM_JOB_ID", "SLURM_JOBID")
    step = _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    nodes = _first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return Settings(
        "srun",
        rank,
        world_size,
        integer(env, "SLURM_LOCALID"),
        world_size if _one_node(env, nodes) else _tasks_here(env),
        f"{job}.{step}" if job else "",
        first_host(nodes) if nodes else None,
    )


def _one_node(env: _Variables, nodes: str) -> bool:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        number = integer(env, name)
        if number is not None:
            return number == 1
    return not re.search(r"[\[,]", nodes)


def _tasks_here(env: _Variables) -> int | None:
    """The tasks on this node, by SLURM's list for all nodes: ``4(x2),3`` means 4, 4 and 3 tasks."""
    node, counts = integer(env, "SLURM_NODEID"), []
    listed = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node is not None and 0 <= node < len(counts) else None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu[07-09,12],login1")
    'gpu07'
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _first(env: _Variables, *names: str) -> str:
    return next((env[name] for name in names if env.get(name)), "")
