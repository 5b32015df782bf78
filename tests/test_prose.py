"""scripts/prose.py counts the right things and names their lines."""

from pathlib import Path

import pytest

from scripts import prose

SOURCE = '''\
"""Why this module exists. What is it for?

Whoever reads this is not the client, and he knows it.
"""
import os  # noqa: F401

# Of those words, some are
# on a second line. What follows is counted too.
def ask(question, *, known, _each=None):
    """Return the answer."""
    told, answer, acked = known
    for told in question:
        os.path.join(told, answer)
    return lambda of: of  # The last one.
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(SOURCE)
    return path


def test_sentences_and_names_are_counted_and_placed(file: Path, tmp_path: Path) -> None:
    figures = prose.measure([file], tmp_path)
    assert (figures.lines, figures.sentences) == (6, 7)
    assert [(place.line, place.fault[:21]) for place in figures.free_relatives] == [
        (3, "free relative: Whoeve"),
        (7, "free relative: Of tho"),
        (8, "free relative: What f"),
    ]
    assert [str(place) for place in figures.called_he] == [
        "example.py:3: called he: Whoever reads this is not the client, and he knows it."
    ]
    # question, known, _each, told, answer, acked, and the lambda's
    assert figures.names == 7
    assert [str(place) for place in figures.vague_names] == [
        "example.py:9: vague name: known",
        "example.py:9: vague name: _each",
        "example.py:11: vague name: told",
        "example.py:14: vague name: of",
    ]


@pytest.mark.parametrize(
    "name", ["speed", "needle", "expected", "sealed", "before", "known_ids", "encoding", "x", "other"]
)
def test_nouns_and_usual_names_are_not_vague(name: str) -> None:
    assert not prose.is_vague(name)


def test_the_exit_code_shows_whether_the_goals_are_met(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main(["--list", str(file)]) == 1
    output = capsys.readouterr().out
    assert "example.py:14: vague name: of" in output
    table = prose.render(
        {"lastbit": prose.Figures(), "httpx 0.28.1": prose.Figures(), "procrastinate 3.10.0": prose.Figures()}
    )
    assert max(map(len, table.splitlines())) <= 80
    file.write_text(
        '"""Adds numbers."""\n\n\ndef add(left_number, right_number):\n    return left_number + right_number\n'
    )
    assert prose.main([str(file)]) == 0
