"""Measure how plainly this project is written: its docstrings, its comments and the names in its functions.

    python -m scripts.prose                   the table for this project (`make prose`)
    python -m scripts.prose --list            and each place to rewrite, as file:line
    python -m scripts.prose --list core api   the same for some files or folders
    python -m scripts.prose --compare         with httpx and Procrastinate, installed from PyPI into a temporary folder

The exit code is 1 if a goal is missed. The rows of the table:

- *free relatives*: the share of sentences that open with Who, Whoever, What, Whatever or Of those. Questions don't
  count.
- *male pronouns*: sentences with one. Neither a program nor a client is a person.
- *vague names*: the share of local names (parameters and variables, once for each function) that are a single function
  word or a single past participle. FUNCTION_WORDS and PARTICIPLES list them; every other word in -ed is a participle
  too, unless it is one of NOUNS or USUAL. Present participles don't count: most are nouns (encoding, mapping).
- *words*: words in docstrings and comments for each hundred lines of code. There is no goal; well-known projects have
  92 to 160.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("httpx", "procrastinate")

FREE_RELATIVES = 0.015
CALLED_HE = 0
VAGUE_NAMES = 0.03

FREE_RELATIVE = re.compile(r"\W*(who|whoever|what|whatever|of those)\b", re.IGNORECASE)
HE = re.compile(r"\b(he|him|his)\b", re.IGNORECASE)
WORD = re.compile(r"[^\W\d_][\w'’-]*")
# A sentence ends at its punctuation mark before a space, at an empty line, or before an entry of a list.
SENTENCE = re.compile(r"\S(?:.*?)(?:[.!?][\"”’)*]*(?=\s)|(?=\n[ \t]*\n)|(?=\n[ \t]*(?:[-*]|\d+\.)[ ])|\Z)", re.DOTALL)
DIRECTIVE = re.compile(r"noqa|type:|pragma|pyright|fmt:|mypy|ruff|shellcheck|!/|-\*-")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Without the usual names of bounds in time (after, before, since, until) and of a second operand (other).
FUNCTION_WORDS = _words("""
    about above again ago ahead all alone already also always among an and anew another any anyone anything apart
    around as aside at away back because behind below beneath beside besides between beyond both but by do does down
    each either else enough ever every everybody everyone everything everywhere few for from further had has have he
    hence her here him his how however if in inside instead into is it its itself just later less lest many may maybe
    me mine more most much my near neither never no nobody none nor not nothing nowhere of off often on once one only
    onto or others our ours out outside over own per perhaps rather same several she so some somebody someone
    something soon sooner still such than that the their theirs them then there these they this those though through
    thus till to together too toward towards two under unless up upon us was we were what whatever when whence where
    whether which while who whoever whole whom whose why will with within without yet you
""")
# The irregular ones, and irregular past tenses.
PARTICIPLES = _words("""
    awoken become been began begun bent bitten born bought bound broken brought built came caught chosen come cut
    dealt done drawn driven dug eaten fallen fed felt flown forbidden forgotten fought found frozen gave given gone
    got gotten grown heard held hidden hit hurt kept known laid led left lent lost made meant met overwritten paid ran
    ridden risen said saw seen sent shaken shown shut slept sold sought spent spoken spread stolen struck stuck sunk
    swept taken taught thought thrown told took torn understood undone unknown unpaid unseen unsent went withheld
    woken won worn wound written wrote
""")
NOUNS = _words("bed exceed feed hundred need seed shed speed thread weed")
# States and counts of the contract, named like their fields, and two names that are usual everywhere.
USUAL = _words("""
    acked applied assigned by cancelled completed counted delivered disabled drained elapsed expected expired failed
    finished handled issued owned parked redelivered rejected resolved sealed succeeded trimmed
""")


@dataclass(frozen=True, order=True)
class Place:
    path: str
    line: int
    fault: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.fault}"


@dataclass
class Figures:
    """The counts of some files, and the places to rewrite."""

    lines: int = 0
    words: int = 0
    sentences: int = 0
    names: int = 0
    free_relatives: list[Place] = field(default_factory=list)
    called_he: list[Place] = field(default_factory=list)
    vague_names: list[Place] = field(default_factory=list)

    @property
    def free_relative_share(self) -> float:
        return len(self.free_relatives) / max(self.sentences, 1)

    @property
    def vague_name_share(self) -> float:
        return len(self.vague_names) / max(self.names, 1)

    @property
    def words_per_hundred_lines(self) -> float:
        return 100 * self.words / max(self.lines, 1)

    @property
    def within_goals(self) -> bool:
        return (
            self.free_relative_share <= FREE_RELATIVES
            and len(self.called_he) <= CALLED_HE
            and self.vague_name_share <= VAGUE_NAMES
        )


def is_vague(name: str) -> bool:
    """Whether a name is a single function word or past participle."""
    word = name.strip("_")
    if not word.isalpha() or word in NOUNS or word in USUAL:
        return False
    return word in FUNCTION_WORDS or word in PARTICIPLES or (len(word) > 3 and word.endswith("ed"))


def local_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The parameters and variables of each function, with the line of the first use."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        names: dict[str, int] = {}
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        for parameter in parameters:
            if parameter and parameter.arg not in ("self", "cls"):
                names.setdefault(parameter.arg, parameter.lineno)
        stack: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else [*function.body]
        while stack:
            node = stack.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node.lineno)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.setdefault(node.name, node.lineno)
            stack[:0] = ast.iter_child_nodes(node)
        yield from names.items()


def docstrings(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """The first and last line and the text of each string that is a separate statement."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.end_lineno or value.lineno, value.value


def comments(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """The first line and the text of each comment; adjacent comment lines are one comment."""
    first, texts = 0, list[str]()
    for token in tokens:
        text = token.string.lstrip("#").strip()
        if token.type != tokenize.COMMENT or DIRECTIVE.match(text):
            continue
        line, column = token.start
        continues = line == first + len(texts) and not token.line[:column].strip()
        if texts and not continues:
            yield first, "\n".join(texts)
        if not texts or not continues:
            first, texts = line, []
        texts.append(text)
    if texts:
        yield first, "\n".join(texts)


def sentences(line: int, text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a text that starts on `line`, each with its own line."""
    for match in SENTENCE.finditer(text):
        if WORD.search(match[0]):
            yield line + text.count("\n", 0, match.start()), " ".join(match[0].split())


def measure(paths: Iterable[Path], root: Path) -> Figures:
    """The figures of Python files, whose places are named relative to `root`."""
    figures = Figures()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        code = {n for token in tokens if token.type not in layout for n in range(token.start[0], token.end[0] + 1)}
        texts = list(comments(tokens))
        for first, last, text in docstrings(tree):
            texts.append((first, text))
            code -= set(range(first, last + 1))
        figures.lines += len(code)
        file_name = str(path.relative_to(root) if path.is_relative_to(root) else path)
        for first, text in sorted(texts):
            figures.words += len(WORD.findall(text))
            for line, sentence in sentences(first, text):
                figures.sentences += 1
                if FREE_RELATIVE.match(sentence) and not sentence.endswith("?"):
                    figures.free_relatives.append(Place(file_name, line, f"free relative: {sentence}"))
                if HE.search(sentence):
                    figures.called_he.append(Place(file_name, line, f"called he: {sentence}"))
        for name, line in local_names(tree):
            figures.names += 1
            if is_vague(name):
                figures.vague_names.append(Place(file_name, line, f"vague name: {name}"))
    return figures


def python_files(paths: Iterable[Path]) -> list[Path]:
    """The Python files among `paths` and in the folders below them, except in hidden folders."""
    files: list[Path] = []
    for path in paths:
        inner = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files += [file for file in inner if not any(p.startswith(".") for p in file.relative_to(path).parts)]
    return files


def install_models(folder: Path) -> dict[str, Figures]:
    """Figures of the models, under their names and versions."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *MODELS], check=True)
    models = {}
    for name in MODELS:
        (metadata,) = folder.glob(f"{name}-*.dist-info")
        version = metadata.name.removesuffix(".dist-info").removeprefix(f"{name}-")
        models[f"{name} {version}"] = measure(python_files([folder / name]), folder)
    return models


def render(columns: dict[str, Figures]) -> str:
    """The table, which fits 80 columns with three projects."""
    rows: list[list[str]] = [["", "goal", *columns]]

    def add(label: str, goal: str, cell: Callable[[Figures], str]) -> None:
        rows.append([label, goal, *map(cell, columns.values())])

    add("lines of code", "", lambda figures: f"{figures.lines:,}")
    add("sentences", "", lambda figures: f"{figures.sentences:,}")
    add("free relatives", f"<= {FREE_RELATIVES:.1%}", lambda figures: f"{figures.free_relative_share:.1%}")
    add("male pronouns", str(CALLED_HE), lambda figures: str(len(figures.called_he)))
    add("local names", "", lambda figures: f"{figures.names:,}")
    add("vague names", f"<= {VAGUE_NAMES:.1%}", lambda figures: f"{figures.vague_name_share:.1%}")
    add("words per 100 lines", "", lambda figures: f"{figures.words_per_hundred_lines:.0f}")
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        figures = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *figures]).rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prose", description="Measure how plainly sources are written."
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; without any, the whole project")
    parser.add_argument("--list", action="store_true", help="print each place to rewrite")
    parser.add_argument(
        "--compare", action="store_true", help=f"also measure {' and '.join(MODELS)}, installed from PyPI"
    )
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in options.paths]
    if missing := [str(path) for path in paths if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    figures = measure(python_files(paths or [ROOT]), ROOT)
    if options.list:
        for place in sorted([*figures.free_relatives, *figures.called_he, *figures.vague_names]):
            print(place)  # noqa: T201
    columns = {"lastbit": figures}
    if options.compare:
        with tempfile.TemporaryDirectory() as folder:
            columns |= install_models(Path(folder))
    print(render(columns))  # noqa: T201
    return 0 if figures.within_goals else 1


if __name__ == "__main__":
    sys.exit(main())
