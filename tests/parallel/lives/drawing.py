"""Random lives."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.parallel.lives.body import MODULES, OPTIMIZERS
from tests.parallel.lives.ways import WAYS

Draw = Callable[[random.Random], Any]

LINEARS = ("first.up", "first.down", "second.up", "spare", "head")


def among(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def chance(of: float) -> Draw:
    return lambda rng: rng.random() < of


def number(rng: random.Random) -> int:
    return rng.randrange(1000)


def routes(rng: random.Random) -> tuple[int, int]:
    """The route of most rows, and that of the last rank's."""
    route = rng.choice((0, 0, 0, 1, 2, 3))
    return route, rng.choice((0, 1, 2, 3)) if rng.random() < 0.15 else route


mode = among("", "", "", "", "recomputed", "reentrant", "autocast", "penalty")
way = among(*WAYS)
FORWARD: Mapping[str, Draw] = {"seed": number, "routes": routes, "mode": mode}

#: The acts: how often each is drawn, and what its arguments are drawn from.
ACTS: dict[str, tuple[int, Mapping[str, Draw]]] = {
    "train": (12, FORWARD),
    "forward": (12, FORWARD),
    "forward_twice": (3, {"seed": number, "routes": routes}),
    "backward": (
        14,
        {"which": among(-1, -1, -1, 0), "retain": chance(0.25), "keep": chance(0.1)},
    ),
    "backward_of_some": (12, {"which": among(-1), "name": among(*MODULES[:-1])}),
    "input_gradient": (2, {"seed": number}),
    "forget": (2, {}),
    "accumulate": (6, FORWARD),
    "step": (9, {}),
    "step_with_closure": (2, {"seed": number, "routes": routes}),
    "zero_grad": (7, {"set_to_none": chance(0.7), "of_optimizer": chance(0.5)}),
    "clip": (3, {"norm": among(0.05, 0.5), "kind": among(2.0, 2.0, 1.0, float("inf"))}),
    "clip_value": (2, {"most": among(0.01, 0.1)}),
    "scale_gradients": (3, {"by": among(0.5, 2.0), "drop": lambda rng: rng.randrange(-6, 14)}),
    "new_optimizer": (3, {"kind": among(*OPTIMIZERS)}),
    "schedule": (3, {}),
    "freeze": (4, {"name": among(*MODULES, *LINEARS), "freezes": chance(0.5)}),
    "cast": (3, {"dtype": among("double", "float")}),
    "cast_there_and_back": (3, {"dtype": among("half", "float")}),
    "save_weights": (5, {}),
    "load_weights": (12, {"assign": chance(0.5), "renew": chance(0.85)}),
    "write": (
        4,
        {
            "number": number,
            "by": among(0.5, 1.5),
            "kind": among("no_grad", "data", "new data"),
        },
    ),
    "replace": (3, {"name": among(*LINEARS), "seed": number, "renew": chance(0.85)}),
    "tie": (3, {"renew": chance(0.9)}),
    "drop_bias": (2, {"name": among("head", "spare", "first.up"), "renew": chance(0.9)}),
    "parametrize": (3, {"name": among(*LINEARS), "renew": chance(0.95)}),
    "average": (4, {"seed": number, "swap": chance(0.25)}),
    "go_on_with_a_copy": (2, {}),
    "move": (3, {"way": way}),
    "resume": (3, {"way": way}),
    "hook": (
        5,
        {
            "kind": among("forward", "before", "backward", "gradient", "after"),
            "name": among("first", "second", "spare", "head", "first.up"),
        },
    ),
    "unhook": (11, {}),
    "look_without_gradients": (4, {"seed": number, "inference": chance(0.3), "back": chance(0.8)}),
    "train_mode": (2, {}),
    "fail_in_forward": (3, {"where": among("first", "second.up", "norm", ""), "seed": number}),
    "fail_in_backward": (3, {"where": among("first", "second", "second.up"), "seed": number}),
    "gather_by_hand": (2, {"frees": chance(0.5)}),
    "keep_gathered": (2, {"after_forward": chance(0.5), "after_backward": chance(0.5)}),
    "look": (8, {}),
    "look_at_states": (3, {}),
    "verify": (2, {}),
}

#: Acts of lives in which a rank does something else.
ALIKE = ("train", "forward", "backward", "step", "accumulate", "zero_grad", "clip", "train", "look")


@dataclass(frozen=True)
class Unlike:
    """What one rank does otherwise.

    Attributes:
        rank: It.
        at: The number of the act.
        kind: "skips" or "doubles" that act, "spoils" the weights before it, or "is another" model
            from the first.
    """

    rank: int
    at: int
    kind: str


@dataclass(frozen=True)
class Life:
    """A life: where it is led, and the acts, as calls of methods of a Body."""

    seed: int
    way: str
    ranks: int
    batch_norm: bool
    dtype: str
    acts: tuple[str, ...]
    unlike: Unlike | None = None

    def __str__(self) -> str:
        acts = "".join(f"    {act}\n" for act in self.acts)
        return (
            f"live({self.way!r}, ranks={self.ranks}, batch_norm={self.batch_norm}, "
            f'dtype={self.dtype!r}, unlike={self.unlike}, seed={self.seed}, acts="""\n{acts}""")'
        )

    def acts_of(self, rank: int) -> list[tuple[int, str]]:
        """The acts of a rank, with their numbers in the life of all."""
        acts, other = list(enumerate(self.acts)), self.unlike
        if other is None or other.rank != rank:
            return acts
        if other.kind == "skips":
            return acts[: other.at] + acts[other.at + 1 :]
        if other.kind == "doubles":
            return acts[: other.at + 1] + acts[other.at :]
        if other.kind == "spoils":
            return [*acts[: other.at], (other.at, "spoil()"), *acts[other.at :]]
        return acts


def drawn(seed: int, unlike: bool = False) -> Life:
    """The life of a number."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 2, 2, 3, 4, 4))
    ways = [name for name, way in WAYS.items() if ranks in way.ranks]
    if ranks == 4:  # these are for no other number of ranks
        ways += 4 * ["hybrid", "ddp tensor", "shards tensor"]
    life = Life(
        seed,
        rng.choice(ways),
        ranks,
        rng.random() < 0.25,
        rng.choice(("double", "double", "double", "float")),
        (),
    )
    if unlike:
        acts = _acts(rng, rng.randrange(4, 10), ALIKE, plain_modes=True)
        kinds = ["skips", "doubles", "is another"] + ["spoils"] * life.way.startswith("ddp")
        # Models become that of rank 0 where they do not raise.
        rank, kind = rng.randrange(1, ranks), rng.choice(kinds)
        # Ranks may accumulate different numbers of micro-batches.
        places = [n for n, act in enumerate(acts[:-2]) if not act.startswith("accumulate")]
        kind = kind if places else "is another"
        at = rng.choice(places) if places else 0
        return replace(life, acts=acts, unlike=Unlike(rank, at, kind))
    return replace(life, acts=_acts(rng, rng.randrange(5, 18), tuple(ACTS)))


def _acts(
    rng: random.Random, count: int, names: Sequence[str], plain_modes: bool = False
) -> tuple[str, ...]:
    weights = [ACTS[name][0] for name in names]
    acts = []
    for name in rng.choices(names, weights, k=count):
        arguments = {key: draw(rng) for key, draw in ACTS[name][1].items()}
        if plain_modes:
            arguments |= {key: value for key, value in _SIMPLE.items() if key in arguments}
        acts.append(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
    return (*acts, "look()", "verify()")


_SIMPLE = {"mode": "", "routes": (0, 0), "keep": False, "which": -1, "set_to_none": True}
