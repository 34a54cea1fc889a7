"""The description of a cluster: what a rank has, and how fast bytes move between ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from tilework.layout import CostModel

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
    **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
}


def memory_bytes(text: str | int | float) -> int:
    """The bytes that a text such as ``"80 GB"`` or ``"64GiB"`` stands for; a number is bytes.

    Raises:
        ValueError: The text is no positive amount of memory.

    Example:
        >>> memory_bytes("80 GB"), memory_bytes("1.5GiB")
        (80000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    unit = "" if found is None else found[2]
    known = {name.lower(): size for name, size in _UNITS.items()}
    if found is None or unit.lower() not in known or float(found[1]) <= 0:
        raise ValueError(
            f"memory must be a positive number with a unit, such as '80 GB' or '64 GiB', got "
            f"{text!r}; units are {', '.join(_UNITS).strip(', ')}"
        )
    return int(float(found[1]) * known[unit.lower()])


class CountedOperator(NamedTuple):
    """A call of an operator: the name, the floating-point operations, the bytes it touches."""

    name: str
    flops: float
    nbytes: float

    @property
    def amount(self) -> float:
        """The operations, or the bytes where torch counts none."""
        return self.flops or self.nbytes


@dataclass(frozen=True)
class Cluster:
    """The machines of a job. A value, kept in a small JSON file.

    Args:
        device: The kind of device that tensors are on.
        memory: The bytes of a rank; None: unlimited.
        flops: Floating-point operations that a rank does in a second, at best.
        bandwidth: Bytes of memory that a rank reads or writes in a second.
        call_seconds: Seconds that an operator costs besides.
        operators: By name of an operator that was measured: seconds for each floating-point
            operation, or for each byte where torch counts no operations.
        latency: Seconds of a message within a host, and ``seconds_per_byte`` for each byte.
        seconds_per_byte: See ``latency``.
        network_latency: The same between hosts.
        network_seconds_per_byte: See ``network_latency``.
        error: The relative error that the fit of operators left; None: nothing was measured.
        measured: The names of what was measured; everything else is an estimate.

    Raises:
        ValueError: A rate is not positive.

    Example:
        >>> Cluster(flops=1e12).collective_seconds(1e9, 4, False) > 0
        True
    """

    device: str = "cpu"
    memory: int | None = None
    flops: float = 5e10
    bandwidth: float = 1e10
    call_seconds: float = 1e-5
    operators: Mapping[str, float] = field(default_factory=dict)
    latency: float = CostModel.latency
    seconds_per_byte: float = CostModel.seconds_per_byte
    network_latency: float = CostModel.network_latency
    network_seconds_per_byte: float = CostModel.network_seconds_per_byte
    error: float | None = None
    measured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rates = self.flops, self.bandwidth
        if min(rates) <= 0 or (self.memory is not None and self.memory <= 0):
            raise ValueError(f"rates and memory must be positive, got {self}")
        self.cost()

    def cost(self) -> CostModel:
        """The prices of messages."""
        return CostModel(
            self.latency, self.seconds_per_byte, self.network_latency, self.network_seconds_per_byte
        )

    def seconds_of(self, operators: Iterable[CountedOperator]) -> float:
        """The expected time of operators, one after the other."""
        return sum(self._seconds(each) for each in operators)

    def _seconds(self, operator: CountedOperator) -> float:
        known = self.operators.get(operator.name)
        if known is not None:
            return known * operator.amount + self.call_seconds
        slowest = max(operator.flops / self.flops, operator.nbytes / self.bandwidth)
        return slowest + self.call_seconds

    def collective_seconds(self, nbytes: float, ranks: int, between_hosts: bool) -> float:
        """The expected time of a collective in which a rank moves ``nbytes``."""
        messages = max(1, (ranks - 1).bit_length())
        return self.cost().collective_seconds(nbytes, messages, between_hosts)

    @property
    def is_measured(self) -> bool:
        """True if the rates of operators were measured."""
        return self.error is not None

    def write(self, path: str | Path) -> None:
        """Write the description to a file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """The description in a file.

        Raises:
            ValueError: The file is no description of a cluster, or cannot be read.
        """
        try:
            given: dict[str, Any] = json.loads(Path(path).read_text())
            unknown = set(given) - {each.name for each in fields(cls)}
            if unknown:
                raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
            if given.get("memory") is not None:
                given["memory"] = memory_bytes(given["memory"])
            given["measured"] = tuple(given.get("measured", ()))
            return cls(**given)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no description of a cluster: {error}. `tilework doctor --describe "
                f"FILE` writes one of this machine"
            ) from None

    def with_memory(self, memory: str | int | None) -> Cluster:
        """The same with another limit of memory; None: with the old limit."""
        return self if memory is None else replace(self, memory=memory_bytes(memory))
