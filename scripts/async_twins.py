"""Write the awaited twins of the SDK's classes, such as `AsyncClient` after `Client`, in the same file.

    python -m scripts.async_twins           write them (`make twins`)
    python -m scripts.async_twins --check   exit with 1 if one is not current

In a twin, a method that sends a request is a coroutine, an iterator is asynchronous, and each class is its own twin.
Docstrings stay as they are, but for that of the class.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TWINS = {
    "Client": "lastbit/client.py",
    "BatchHandle": "lastbit/batch.py",
    "Groups": "lastbit/groups.py",
    "Processes": "lastbit/processes/calls.py",
    "Tally": "lastbit/tallies/tally.py",
    "Webhooks": "lastbit/webhooks.py",
}
"""The classes whose twins are written, and their files."""
OTHERS = ("Acker", "Driver", "Iterator", "TallyBuffer")
"""Other classes with a twin."""
KEPT = {"Client": ("__init__", "over", "acker", "close", "__aenter__", "__aexit__")}
"""Methods of twins that are written by hand: they hold what belongs to an event loop."""
ASYNCHRONOUS = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def written(name: str) -> str:
    """The text of the file of this class, with its twin as it should be."""
    text = (ROOT / TWINS[name]).read_text()
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    original, twin = classes[name], classes[f"Async{name}"]
    by_hand = {method: source for method, source in _members(text, twin) if method in KEPT.get(name, ())}
    sources = dict(_members(text, original))
    awaited: set[str] = set()
    for method, source in sources.items():
        if _Differences(source, awaited).is_awaited:
            awaited.add(method)
    members = [
        by_hand.get(ASYNCHRONOUS.get(method, method)) or _twin_of(source, awaited) for method, source in sources.items()
    ]
    lines = text.splitlines(keepends=True)
    head = lines[: twin.body[0].end_lineno]
    body = "\n" + "\n".join(textwrap.indent(member, "    ") + "\n" for member in members)
    return _formatted("".join(head) + body + "".join(lines[twin.end_lineno :]))


def _members(text: str, owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The names and sources of a class's methods, properties and attributes, in their order."""
    lines = text.splitlines()
    for node in owner.body[1:]:
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ast.unparse(node)
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        yield name, textwrap.dedent("\n".join(lines[start - 1 : node.end_lineno]))


class _Differences(ast.NodeVisitor):
    """The places where the twin of a member differs: (line, column) → the text to insert."""

    def __init__(self, source: str, awaited: set[str]) -> None:
        self._calls = {"self._driver.run", *(f"self.{method}" for method in awaited)}
        self.places: dict[tuple[int, int], str] = {}
        self.visit(ast.parse(source))

    @property
    def is_awaited(self) -> bool:
        return not {"await ", "(await ", "async "}.isdisjoint(self.places.values())

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in self._calls:
            self.places[node.lineno, node.col_offset] = "await "
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in (*TWINS, *OTHERS):
            self.places[node.lineno, node.col_offset] = "Async"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._enclose(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._enclose(node)

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "self._driver.iterate":
            self.places[node.lineno, node.col_offset] = "async "
        self.generic_visit(node)

    def _enclose(self, node: ast.Attribute | ast.Subscript) -> None:
        """Await a call in parentheses, if a part of its result is used."""
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and self.places.get((call.lineno, call.col_offset)) == "await ":
            self.places[call.lineno, call.col_offset] = "(await "
            assert call.end_lineno is not None
            assert call.end_col_offset is not None
            self.places[call.end_lineno, call.end_col_offset] = ")"


def _twin_of(source: str, awaited: set[str]) -> str:
    differences = _Differences(source, awaited)
    places = differences.places
    (node,) = ast.parse(source).body
    if differences.is_awaited:
        places[node.lineno, node.col_offset] = "async "
    lines = source.splitlines()
    for (line, column), text in sorted(places.items(), reverse=True):
        lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    return "\n".join(lines)


def _formatted(text: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "twin.py", "-"]
    formatted: str = subprocess.run(ruff, cwd=ROOT, input=text, capture_output=True, text=True, check=True).stdout
    return formatted


def stale() -> list[str]:
    """The classes whose twins are not current."""
    return [name for name, file in TWINS.items() if written(name) != (ROOT / file).read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.async_twins", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a twin is not current")
    options = parser.parse_args()
    for name in stale():
        print(f"the twin of {name} in {TWINS[name]} {'is not current' if options.check else 'was written'}")  # noqa: T201
        if options.check:
            return 1
        (ROOT / TWINS[name]).write_text(written(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
