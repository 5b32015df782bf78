"""Make subpackages of top-level packages, by rewriting their imports of each other.

`from core import errors` becomes `from lastbit_server.core import errors`, wherever it is in a module: also in a
function, or for types alone. The rest of the text remains as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator


def rewritten(source: str, packages: Collection[str], parent: str) -> str:
    """The source of a module of one of `packages`, as it must be when all of them are below the package `parent`."""
    lines = source.encode().splitlines(keepends=True)  # the columns of syntax trees count bytes
    for line, column, old, new in sorted(_changes(ast.parse(source), packages, parent), reverse=True):
        text = lines[line - 1]
        if not text.startswith(old.encode(), column):
            raise SystemExit(f"line {line} is laid out in an unknown way, {old!r} isn't at its column {column}")
        lines[line - 1] = text[:column] + new.encode() + text[column + len(old.encode()) :]
    return b"".join(lines).decode()


def _changes(tree: ast.Module, packages: Collection[str], parent: str) -> Iterator[tuple[int, int, str, str]]:
    """The line and column of each name of a package in an import, with the old and the new text there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if _package(module) in packages:
                yield node.lineno, node.col_offset + len("from "), module, f"{parent}.{module}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (package := _package(alias.name)) in packages:
                    new = f"{parent}.{alias.name}"
                    if alias.asname is None:
                        # `import core.feed` imports the module, and binds the name `core`.
                        new += f" as {package}" if alias.name == package else f", {parent}.{package} as {package}"
                    yield alias.lineno, alias.col_offset, alias.name, new


def _package(module: str) -> str:
    return module.partition(".")[0]
