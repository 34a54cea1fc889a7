"""Docstrings as Markdown: roles become links to the API's pages where the name is public."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|ref|obj):`~?([^`<]+)`")
#: A paragraph that ends with two colons, and the indented block after it.
_LITERAL = re.compile(
    r"(?m)^(?P<indent> *)(?P<text>\S[^\n]*)::\n\n(?P<block>(?:(?P=indent) +[^\n]+\n?|\n)+)"
)
_SESSION = re.compile(r"(?m)^Example:(?=\n\s*>>>)")


class Roles(griffe.Extension):
    """Rewrites Sphinx's roles and literal blocks, which Markdown does not know."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring of the package, whose public names are known by now."""
        self._collect(pkg)
        self._rewrite(pkg)

    def _collect(self, module: griffe.Module) -> None:
        for name in module.exports or ():
            self._paths.setdefault(str(name), f"{module.path}.{name}")
        for member in module.members.values():
            if not member.is_alias and member.is_module:
                self._collect(member)  # type: ignore[arg-type]

    def _rewrite(self, item: Any) -> None:
        if item.docstring:
            item.docstring.value = self._markdown(item.docstring.value)
        for member in item.members.values():
            if not member.is_alias:
                self._rewrite(member)

    def _markdown(self, text: str) -> str:
        text = _SESSION.sub("Examples:", text)  # the section in which a session is code
        return _ROLE.sub(self._link, _LITERAL.sub(self._fence, text))

    def _fence(self, found: re.Match[str]) -> str:
        indent = found["indent"]
        block = textwrap.indent(textwrap.dedent(found["block"]).rstrip(), indent)
        return f"{indent}{found['text']}:\n\n{indent}```python\n{block}\n{indent}```\n\n"

    def _link(self, found: re.Match[str]) -> str:
        name = found[1]
        path = self._paths.get(name) or self._paths.get(name.rpartition(".")[2])
        if path is None:
            return f"`{name}`"
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'
