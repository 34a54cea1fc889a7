"""The search of the documentation's site, as far as its ranking of pages goes, in Python.

It reads the index of a built site (``make docs``), and without one the pages themselves, cut into
sections as the site cuts them. The weights are those of docs/site/hooks.py and of the theme.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "build/site/search/search_index.json"
_TITLE_WEIGHT = 10.0
_WORD = re.compile(r"[a-z0-9_]+")
_SECTION = re.compile(r"(?m)^#{1,3} (.+)$")


@dataclass(frozen=True)
class Section:
    page: str
    title: str
    text: str
    boost: float


def constant_of_hooks(name: str) -> Any:
    """A constant of docs/site/hooks.py, which imports mkdocs: not installed with the tests."""
    tree = ast.parse((ROOT / "docs/site/hooks.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"docs/site/hooks.py has no {name}")


def sections_of_sources() -> list[Section]:
    boosts, aliases = constant_of_hooks("BOOSTS"), constant_of_hooks("ALIASES")
    sections = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.relative_to(ROOT / "docs").as_posix()
        boost = next((boost for begin, boost in boosts if page.startswith(begin)), 1.0)
        page_name = page.replace("README.md", "index.md")
        parts = _SECTION.split(path.read_text())
        titles = [f"{parts[1]} {aliases.get(page, '')}", *parts[3::2]]
        for title, body in zip(titles, parts[2::2], strict=True):
            sections.append(Section(page_name, title, body, boost))
    return sections


def sections_of_site(index: Path) -> list[Section]:
    return [
        Section(
            each["location"].partition("#")[0].replace(".html", ".md") or "index.md",
            " ".join([each["title"], *each.get("tags", ())]),
            re.sub(r"<[^>]+>", " ", each["text"]),
            float(each.get("boost", 1.0)),
        )
        for each in json.loads(index.read_text())["docs"]
    ]


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Search:
    """Ranks pages by the best of their sections: rare words, in titles above all."""

    def __init__(self, sections: list[Section]) -> None:
        self._sections = [
            (section, Counter(words(section.title)), Counter(words(section.text)))
            for section in sections
        ]
        self._in: Counter[str] = Counter()
        for _, title, text in self._sections:
            self._in.update({*title, *text})

    def pages(self, query: str) -> list[str]:
        """The pages that have every word of the query, the best first."""
        best: dict[str, float] = {}
        for section, title, text in self._sections:
            score = 0.0
            for word in words(query):
                matches = [w for w in {*title, *text} if w.startswith(word)]
                if not matches:
                    score = 0.0
                    break
                rarity = math.log(1 + len(self._sections) / sum(self._in[w] for w in matches))
                count = sum(_TITLE_WEIGHT * title[w] + text[w] for w in matches)
                score += rarity * count / (count + 3)
            if score:
                best[section.page] = max(best.get(section.page, 0.0), score * section.boost)
        return sorted(best, key=lambda page: (-best[page], page))
