"""Everything that can be chosen about a launch, and which choices go together.

The command line has checked the range of each option.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, get_args

from tilework.launch.binding import BindMode

StartMethod = Literal["fork", "spawn"]
PrefixMode = Literal["auto", "all", "others", "none"]

#: Backends that ranks in separate processes can use by name.
KNOWN_BACKENDS: Final = ("shm", "hybrid", "gloo", "nccl", "ucc", "mpi")
#: Device types that a backend may be chosen for, as in "cpu:shm,cuda:nccl".
KNOWN_DEVICES: Final = ("cpu", "cuda", "mps", "xpu", "hpu", "meta")


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch; a ValueError says which of them do not go together."""

    nprocs: int
    start: StartMethod = "fork"
    """``fork``: from a process that has imported torch; ``spawn``: fresh interpreters."""
    backend: str | None = None
    timeout: timedelta | None = None
    log_dir: Path | None = None
    """The folder for ``rank-K.stdout`` and ``rank-K.stderr``, in addition to the terminal."""
    master_port: int | None = None
    """The TCP port for MASTER_PORT, on 127.0.0.1 or on the host of ``rdzv``; 0: any free port;
    None: ranks get no MASTER_ADDR and no MASTER_PORT."""
    prefix: PrefixMode = "auto"
    """The ranks whose lines begin with ``[rank]``; ``auto``: all if there are several ranks."""

    restarts: int = 0
    max_restarts: int = 0
    """The number of times that all ranks start again after the job has failed."""
    elastic: tuple[int, int] | None = None
    """The minimum and maximum of ranks to continue with; None: any number if ``restarts`` is
    positive, else the job ends with any rank.
    """
    grace: timedelta = timedelta(seconds=2)
    """The time that ranks have to end, when the user ends the job, before SIGKILL."""
    bind: BindMode = "none"
    huge_pages: bool | None = None
    """Large tensors ask for huge pages, or do not; None: as the environment has it."""
    nnodes: int = 1
    """The number of hosts whose launchers start the job's ranks; ``nprocs`` may differ by host."""
    node_rank: int = 0
    elastic_nodes: tuple[int, int] | None = None
    """The fewest and the most hosts, which come and go; None: ``nnodes``, which stay."""
    rdzv: tuple[str, int] | None = None
    """Host and port at which the launchers meet; the launcher of node 0 serves there, or, with
    ``elastic_nodes``, ``tilework store``."""
    trace: Path | None = None
    """The folder that ranks write their traces to; None: ranks trace only what they choose to."""

    watch: timedelta | None = None
    """The time between two lines about the ranks of this host; None: there are none."""

    @property
    def outlives_ranks(self) -> bool:
        return self.restarts > 0 or self.elastic is not None or self.elastic_nodes is not None

    @property
    def several_hosts(self) -> bool:
        return self.nnodes > 1 or self.elastic_nodes is not None

    def __post_init__(self) -> None:
        self._check_nodes()
        if self.nprocs < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.nprocs}")
        if self.start not in get_args(StartMethod):
            raise ValueError(f'the start method is "fork" or "spawn", got {self.start!r}')
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"the timeout must be longer than 0 s, got {self.timeout}")
        if self.backend is not None:
            check_backend(self.backend)
        if self.elastic is not None and not self.elastic[0] <= self.nprocs <= self.elastic[1]:
            least, most = self.elastic
            raise ValueError(
                f"{self.nprocs} ranks are not between the {least} and {most} of elastic"
            )

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"the node's rank is 0 to {self.nnodes - 1} with {self.nnodes} nodes, got "
                f"{self.node_rank}"
            )
        if not self.several_hosts:
            return
        if self.max_restarts:
            raise ValueError(
                "max-restarts is for one host: take --nnodes MIN:MAX with --restarts for several"
            )
        if self.rdzv is None:
            served = "of node 0 and a free port" if self.elastic_nodes is None else "and the port"
            by = "" if self.elastic_nodes is None else " where `tilework store` serves"
            raise ValueError(
                f"{self.nnodes} nodes need a place to meet: give each --rdzv HOST:PORT, an address "
                f"{served} there{by}"
            )
        if self.elastic_nodes is not None:
            self._check_elastic_nodes()
        elif self.outlives_ranks:
            raise ValueError(
                f"restarts and elastic are for the ranks of one host, or of hosts that come and "
                f"go, with a `tilework store`: give --nnodes {self.nnodes}:{self.nnodes}"
            )

    def _check_elastic_nodes(self) -> None:
        if self.elastic is not None:
            raise ValueError("--nnodes MIN:MAX says how far a job may shrink: leave out --elastic")
        if self.node_rank or self.master_port is not None:
            raise ValueError(
                "hosts that come and go have neither fixed numbers nor a fixed rank 0: leave out "
                "--node-rank, --tcp and --master-port with --nnodes MIN:MAX"
            )


def check_backend(spec: str) -> None:
    """Raise ValueError unless ``spec`` names backends for ranks: "shm", "cpu:shm,cuda:nccl"."""
    for part in spec.split(","):
        device, colon, name = part.strip().rpartition(":")
        if colon and device not in KNOWN_DEVICES:
            raise ValueError(
                f"unknown device type {device!r} in backend {spec!r}{_guess(device, KNOWN_DEVICES)}"
                f' give a backend ("shm") or one per device type ("cpu:shm,cuda:nccl")'
            )
        if name == "threads":
            raise ValueError(
                "backend 'threads' is for ranks that are threads of one process "
                "(tilework.testing.run_ranks); ranks started here are processes: use 'shm'"
            )
        if name not in KNOWN_BACKENDS:
            raise ValueError(
                f"unknown backend {name!r}{_guess(name, KNOWN_BACKENDS)} known are "
                f"{', '.join(KNOWN_BACKENDS)}; one that your program registers itself is named "
                f"in its init_process_group(backend=...) instead"
            )


def _guess(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ":"
