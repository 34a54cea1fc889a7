"""The collectives of a program, in a list that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.show import Page, TextTable, count_text


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective, and the cause."""

    operator: str
    """The cause: torch's name of the operator, or the method; ``backward`` if it is unknown in a
    backward pass. For gradients that are reduced together the number, like ``3 parameters``."""
    collective: str
    """``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all`` or ``plan``."""
    axes: tuple[str, ...]
    """The axes of the mesh along which it runs; by number where they have no names."""
    tensor: str
    """The tensor before, like ``f32[8@dp, 4]``. For gradients that are reduced together the local
    shapes, with the dtypes."""
    target: str
    """The tensor afterwards; ``summed`` for gradients that are reduced together."""
    nbytes: int
    """The bytes on the rank that sends or receives the most."""
    site: str
    """``file:line in function`` of the program; where ``backward`` was called for a gradient."""
    gradient: bool = False
    """True in a backward pass."""
    gathered: bool = False
    """True if the operator has no rule for the call."""


@dataclass
class EventLog:
    """This rank's collectives. ``print`` shows them as a table, and rich draws it."""

    events: list[CollectiveEvent] = field(default_factory=list)
    """The collectives, in the order in which they ran."""

    @property
    def nbytes(self) -> int:
        """The bytes of all events."""
        return sum(event.nbytes for event in self.events)

    @property
    def gathered(self) -> list[CollectiveEvent]:
        """The events of gathers for lack of a rule."""
        return [event for event in self.events if event.gathered]

    def __len__(self) -> int:
        return len(self.events)

    def __rich__(self) -> Page:
        gathered = len(self.gathered)
        causes = f", {gathered} of them to gather for lack of a rule" if gathered else ""
        count = count_text(len(self), "collective") if self.events else "no collectives"
        summary = f"{count}{causes}, {self.nbytes:,} bytes per rank"
        titles = ("operator", "collective", "axes", "tensor", "to", "bytes", "where")
        rows = [
            (
                event.operator + " (gradient)" * event.gradient + " (no rule)" * event.gathered,
                event.collective,
                ", ".join(event.axes),
                event.tensor,
                event.target,
                f"{event.nbytes:,}",
                event.site,
            )
            for event in self.events
        ]
        return Page(summary, TextTable(titles, rows, {5}))

    def __str__(self) -> str:
        return str(self.__rich__())

    def _repr_html_(self) -> str:
        return self.__rich__().html()
