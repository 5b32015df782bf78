"""Mutants: the code broken on purpose, each in one known way, and the test that must then fail.

    @mutant("the-head-is-not-locked", "core.feed:append", "lock_head(tx)", "read_head(tx)")
    def test_positions_have_no_gap() -> None: ...

`python -m tests.mutants [NAME …]` runs each mutant's test against it and prints KILLED or SURVIVED; it exits with 1 if
any survives. A test that can't fail protects no guarantee.

A mutant replaces an expression, or some statements, of one function, which is compiled again in its module. They are
compared by syntax: layout and comments don't matter. LASTBIT_MUTANT names the mutant to apply, in the test's process
and in the processes that the test starts. Decorators are read from the files, which needs no import of a test.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import enum
import functools
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

VARIABLE = "LASTBIT_MUTANT"
TESTS = Path(__file__).parent
NO_TESTS = 5
"""pytest's exit code if it has selected no test."""

Test = TypeVar("Test", bound=Callable[..., Any])


def mutant(
    name: str,
    where: str,
    old: str,
    new: str,
    *also: tuple[str, str],
    case: str | None = None,
    only: Literal["sqlite", "mariadb", "postgresql"] | None = None,
    together_with: tuple[str, ...] = (),
) -> Callable[[Test], Test]:
    """The decorated test must fail if `old` is replaced by `new`. All arguments are literals.

    `where` is module:function or module:Class.method. `old` is an expression or statements that occur there exactly
    once; so are the further pairs of `also`. An empty `new` removes statements. `case` is the test's parameters, if it
    has any and one is enough. `only` is the database whose statements or locks it breaks; without it, all of them.
    `together_with` are the names of mutants of other functions that are applied with it.
    """
    return lambda test: test


@dataclass(frozen=True)
class Mutant:
    """The arguments of a decorator, and the decorated test: its file below tests/, and its name."""

    test: str
    name: str
    where: str
    changes: tuple[tuple[str, str], ...]
    only: str | None = None
    together_with: tuple[str, ...] = ()

    def put_in_place(self) -> None:
        for name in self.together_with:
            named(name).put_in_place()
        owner, name, function = self.build()
        setattr(owner, name, function)

    def build(self) -> tuple[object, str, object]:
        """The object that owns the function, the function's name, and the broken function."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(module_name)
        *classes, name = path.split(".")
        owner: object = module
        for class_name in classes:
            owner = getattr(owner, class_name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
        for old, new in self.changes:
            if (count := _replace(tree, old, new)) != 1:
                raise AssertionError(f"{self.name}: {old!r} occurs {count} times in {self.where}")
        # `super()` without arguments looks for a name __class__ around the function.
        source = ast.parse(f"from __future__ import annotations\ndef outer(__class__): return {name}")
        cast(ast.FunctionDef, source.body[-1]).body[:0] = tree.body
        namespace: dict[str, Any] = {}
        exec(compile(ast.unparse(source), f"<mutant {self.name}>", "exec"), vars(module), namespace)
        return owner, name, namespace["outer"](owner)


def _replace(tree: ast.Module, old: str, new: str) -> int:
    """Put `new` in all places of `old`, and tell how many there are."""
    old_statements, new_statements = ast.parse(textwrap.dedent(old)).body, ast.parse(textwrap.dedent(new)).body
    match old_statements, new_statements:
        case [ast.Expr(old_value)], [ast.Expr(new_value)]:
            expressions = _Expressions(old_value, new_value)
            expressions.visit(tree)
            return expressions.count
        case _:
            return sum(_replace_in_block(block, old_statements, new_statements) for block in _blocks(tree))


class _Expressions(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new, self.count = ast.dump(old), new, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and ast.dump(node) == self._old:
            self.count += 1
            return self._new
        return self.generic_visit(node)


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """All lists of statements."""
    values = (value for node in ast.walk(tree) for _, value in ast.iter_fields(node))
    return [value for value in values if isinstance(value, list) and value and isinstance(value[0], ast.stmt)]


def _replace_in_block(block: list[ast.stmt], old: list[ast.stmt], new: list[ast.stmt]) -> int:
    old_dumps, dumps = list(map(ast.dump, old)), list(map(ast.dump, block))
    starts = [start for start in range(len(block)) if dumps[start : start + len(old)] == old_dumps]
    for start in reversed(starts):
        block[start : start + len(old)] = new
    if not block:
        block.append(ast.Pass())
    return len(starts)


def in_file(path: Path) -> Iterator[Mutant]:
    """The mutants of the tests in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == mutant.__name__:
                    name, where, old, new, *also = map(ast.literal_eval, call.args)
                    options = {option.arg: ast.literal_eval(option.value) for option in call.keywords}
                    case = options.pop("case", None)
                    test = f"{path.relative_to(TESTS)}::{node.name}" + (f"[{case}]" if case else "")
                    yield Mutant(test, name, where, ((old, new), *also), **options)


def _files(text: str) -> Iterator[Path]:
    """The files of tests that have this text."""
    return (path for path in sorted(TESTS.rglob("*.py")) if text in path.read_text())


@functools.cache
def every() -> tuple[Mutant, ...]:
    return tuple(a_mutant for path in _files("@mutant(") for a_mutant in in_file(path))


def named(name: str) -> Mutant:
    return next(a_mutant for path in _files(f'"{name}"') for a_mutant in in_file(path) if a_mutant.name == name)


@functools.cache
def from_environment() -> None:
    """Apply the mutant that the environment names; once, though several test folders ask for it."""
    name = os.environ.get(VARIABLE)
    if name:
        named(name).put_in_place()


class Verdict(enum.Enum):
    KILLED = "KILLED"
    """The test itself has failed."""
    SURVIVED = "SURVIVED"
    NOT_THERE = "NOT THERE"
    """The test does not run on the selected database, or the mutant breaks nothing there."""


def _run(mutant: Mutant, database: str | None = None) -> tuple[Verdict, str]:
    """The verdict, and the first line of the reason. `database`: where alone the test runs."""
    if database is not None and mutant.only not in (None, database):
        return Verdict.NOT_THERE, f"it breaks only {mutant.only}"
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:xdist", f"{TESTS / mutant.test}"],
        env={
            **os.environ,
            **({} if database is None else {"LASTBIT_TEST_DATABASES": database}),
            VARIABLE: mutant.name,
            "CI": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if database is not None and process.returncode == NO_TESTS:
        return Verdict.NOT_THERE, f"its test does not run on {database}"
    failed = process.returncode == 1 and re.search(r"^FAILED ", process.stdout, re.MULTILINE) is not None
    if not failed and process.returncode != 0:
        return Verdict.SURVIVED, f"the test did not run:\n{process.stdout}{process.stderr}"
    reason = re.search(r"^\S+:\d+: (.*)$", process.stdout, re.MULTILINE)
    return (
        Verdict.KILLED if failed else Verdict.SURVIVED,
        f"{reason[1][:120] if reason else ''} ({time.monotonic() - start:.0f} s)",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--database", choices=["sqlite", "mariadb", "postgresql"], help="run the tests there alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    selection = [mutant for mutant in every() if not options.names or mutant.name in options.names]
    if unknown_names := set(options.names) - {mutant.name for mutant in selection}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown_names))}")
    counts = Counter[Verdict]()
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        for mutant, (verdict, reason) in zip(
            selection, pool.map(_run, selection, itertools.repeat(options.database)), strict=True
        ):
            counts[verdict] += 1
            print(f"{verdict.value:9} {mutant.name}\n          by {mutant.test}\n          {reason}", flush=True)
    tried = len(selection) - counts[Verdict.NOT_THERE]
    print(f"{counts[Verdict.KILLED]} of {tried} mutants were killed")
    return 1 if counts[Verdict.SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
