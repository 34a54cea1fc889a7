"""Docstrings as Markdown: roles become links to the API's pages where the name is public.

A first paragraph becomes one line, as lists of names show the first line. Special methods that
nobody calls by an operator or a statement are left out.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe
from api_pages import PACKAGES, PAGES, public_names

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|ref|obj):`~?([^`<]+)`")
#: A paragraph that ends with two colons, and the indented block after it.
_LITERAL = re.compile(
    r"(?m)^(?P<indent> *)(?P<text>\S[^\n]*)::\n\n(?P<block>(?:(?P=indent) +[^\n]+\n?|\n)+)"
)
_FIRST_PARAGRAPH = re.compile(r"\A(?:[^\n]+\n)+[^\n]+")
_SESSION = re.compile(r"(?m)^Example:(?=\n\s*>>>)")
#: Special methods that have entries, and the constructor, which is merged into its class.
SHOWN = {"__all__", "__call__", "__getitem__", "__init__", "__iter__", "__len__"}


class Roles(griffe.Extension):
    """Rewrites Sphinx's roles and literal blocks, which Markdown does not know."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring of the package, whose public names are known by now."""
        self._collect(pkg)
        self._rewrite(pkg)
        for page in PAGES:
            if page.modules:  # whose page has words of its own
                pkg[page.package.removeprefix("tilework.")].docstring = None
        for package in PACKAGES:
            self._name_functions(pkg[package.removeprefix("tilework.")])

    def _name_functions(self, package: griffe.Module) -> None:
        """Let public names stand for functions, not for the modules of the same names."""
        root = package.package
        sources = public_names(package.path).items()
        found = {name: root[path.removeprefix("tilework.")] for name, path in sources}
        for name, item in found.items():
            if not item.is_alias and not item.is_module:
                package.set_member(name, griffe.Alias(name, item, parent=package))

    def _collect(self, module: griffe.Module) -> None:
        for name in module.exports or ():
            self._paths.setdefault(str(name), f"{module.path}.{name}")
        for member in module.members.values():
            if not member.is_alias and member.is_module:
                self._collect(member)  # type: ignore[arg-type]

    def _rewrite(self, item: Any) -> None:
        if item.docstring:
            item.docstring.value = self._markdown(item.docstring.value)
        for name, member in list(item.members.items()):
            if re.fullmatch(r"__\w+__", name) and name not in SHOWN:
                item.del_member(name)
            elif not member.is_alias:
                self._rewrite(member)

    def _markdown(self, text: str) -> str:
        text = _FIRST_PARAGRAPH.sub(lambda found: found[0].replace("\n", " "), text)
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
