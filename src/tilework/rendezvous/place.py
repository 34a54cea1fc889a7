"""A URL's rank and world size: from the query and from arguments, checked."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

#: "Not given", as in torch.
UNSET = -1


@dataclass(frozen=True)
class RankPlace:
    """A rank and the number of ranks; -1 stands for a number that was not given.

    Attributes:
        rank: The global rank.
        world_size: The number of ranks.
    """

    rank: int = UNSET
    world_size: int = UNSET

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("world_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least and value != UNSET:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if UNSET not in (self.rank, self.world_size) and self.rank >= self.world_size:
            raise ValueError(
                f"rank must be less than world_size, got rank {self.rank} of {self.world_size}: "
                "ranks count from 0"
            )

    def needed(self, url: str) -> RankPlace:
        """This object itself, after a check that rank and world size are given.

        Raises:
            ValueError: A number is missing; the error says how to give it.
        """
        for name in ("rank", "world_size"):
            if getattr(self, name) == UNSET:
                raise ValueError(
                    f"{url!r} needs a {name}: pass {name}=, or add ?{name}=… to the URL"
                )
        return self


def split_url(url: str) -> SplitResult:
    """The parts of ``url``. Raises TypeError or ValueError if it is no URL with a scheme."""
    if not isinstance(url, str):
        raise TypeError(f"a rendezvous URL must be a str, got {type(url).__name__}: {url!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if not parts.scheme:
        raise ValueError(
            f"{url!r} has no scheme: expected something like env://, tcp://host:port or "
            "file:///path"
        )
    return parts


def query_of(url: str) -> dict[str, str]:
    """The arguments in the query of ``url``. Raises ValueError if a name comes twice."""
    query: dict[str, str] = {}
    try:
        pairs = parse_qsl(split_url(url).query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        if not split_url(url).query:
            return query
        raise ValueError(f"the query of {url!r} must look like ?rank=0&world_size=2") from None
    for name, value in pairs:
        if name in query:
            raise ValueError(f"{url!r} gives {name} twice")
        query[name] = value
    return query


def merge(url: str, place: RankPlace) -> str:
    """``url`` with the numbers of ``place`` in the query. Raises ValueError if both disagree."""
    query = query_of(url)
    for name in ("rank", "world_size"):
        value = getattr(place, name)
        if value == UNSET:
            continue
        if query.get(name, str(value)) != str(value):
            raise ValueError(
                f"{url!r} says {name}={query[name]}, the argument says {name}={value}: give it once"
            )
        query[name] = str(value)
    if not query:
        return url
    # Not urlunsplit: it would take the slashes from env://.
    return f"{url.partition('?')[0]}?{urlencode(query, quote_via=quote)}"


def place_of(url: str) -> RankPlace:
    """The rank and world size in the query of ``url``; ValueError if it has other arguments."""
    query = query_of(url)
    unknown = sorted(set(query) - {"rank", "world_size"})
    if unknown:
        raise ValueError(
            f"{url!r} has unknown arguments {', '.join(unknown)}: expected rank and world_size"
        )
    numbers: dict[str, int] = {}
    for name, text in query.items():
        try:
            numbers[name] = int(text)
        except ValueError:
            raise ValueError(f"{name} in {url!r} must be an integer, got {text!r}") from None
    return RankPlace(**numbers)
