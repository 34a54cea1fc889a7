"""A job's life in phases, in one of which something goes wrong. All from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

PHASES = (
    "import",
    "rendezvous",
    "bring-up",
    "new_group",
    "mesh",
    "between",
    "operation",
    "coalescing",
    "callback",
    "destroy",
    "exit",
)
#: Before a rank has told anybody that it is there: it is as one that is late.
BEFORE_ALL = ("import", "rendezvous")
#: Afterwards nobody waits for anybody.
AFTER_ALL = ("destroy", "exit")

FAULTS = {
    "kill": "is killed",
    "exec": "becomes another program",
    "exit": "exits without a word",
    "stop": "is stopped, and continued when it is too late",
    "few files": "may open no more files",
    "little memory": "may map no more memory",
    "none": "-",
}
#: Of these the rank itself hears in one of its calls, and says so to all.
LIMITS = ("few files", "little memory")
#: After these there is no such rank any more.
LOSSES = ("kill", "exec", "exit")
LAUNCHERS = ("tilework run", "torchrun", "mpirun", "bare")
CONDITIONS = ("plain", "plain", "pid namespace", "strangers")
STORES = ("file", "tcp")
#: Far longer than a loss may go unnoticed.
LONGEST_SECONDS = 20.0


@dataclass(frozen=True)
class Life:
    """One trial."""

    seed: int
    n: int
    #: "fork", or one of LAUNCHERS.
    launcher: str
    phase: str
    fault: str
    victim: int
    #: Seconds from when the victim enters the phase.
    delay: float
    store: str
    condition: str

    @property
    def limit(self) -> float:
        """Seconds that a rank waits for others, where nothing tells it that it waits in vain."""
        if self.fault == "stop":
            return 1.0
        return 2.0 if self.phase in BEFORE_ALL else LONGEST_SECONDS

    def limit_in(self, phase: str) -> float:
        """The same, in one phase: ranks must get to that of the fault, however busy the machine."""
        is_earlier = PHASES.index(phase) < PHASES.index(self.phase)
        return LONGEST_SECONDS if is_earlier else self.limit

    @property
    def is_noticed(self) -> bool:
        """True if others find out without waiting for as long as they may."""
        return self.fault != "stop" and self.phase not in BEFORE_ALL

    def __str__(self) -> str:
        return (
            f"life {self.seed}: {self.n} ranks by {self.launcher}, {self.store} store, "
            f"{self.condition}; rank {self.victim} {FAULTS[self.fault]} in {self.phase}, after "
            f"{self.delay * 1e3:.1f} ms"
        )


def draw_life(seed: int, launched: bool) -> Life:
    """The life that a seed stands for: by a launcher, or forked, which is ten times as fast."""
    draw = random.Random(seed)
    fault = draw.choices(list(FAULTS), [6, 3, 2, 2, 1, 1, 1])[0]
    # A limit counts from before the first call that takes files or memory; an end comes anywhere.
    phase = "rendezvous" if fault in LIMITS else draw.choice(PHASES[1:])
    launcher = draw.choice(LAUNCHERS) if launched else "fork"
    n = 2 if launched else draw.choice([2, 3, 4])
    if launched and draw.random() < 0.2 and fault not in LIMITS:
        phase = "import"
    return Life(
        seed,
        n,
        launcher,
        phase,
        fault,
        victim=draw.randrange(n),
        delay=draw.choice([0.0, draw.uniform(0, 0.005), draw.uniform(0, 0.05)]),
        store=draw.choice(STORES),
        condition="plain" if launched else draw.choice(CONDITIONS),
    )
