"""The files for contributors agree with each other: the Makefile, .ci, the workflows and pre-commit."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lastbit import __version__
from scripts import version
from tests.support.servers import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def recipe(target: str) -> str:
    (text,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(text)


def test_make_alone_prints_every_target_within_eighty_columns() -> None:
    output = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (declaration,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"^  ([a-z0-9-]+) +\w", output, re.MULTILINE) == declaration.replace("\\", "").split()
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(("script", "workflow"), [("run", "ci.yml"), ("nightly", "nightly.yml")])
def test_the_workflow_runs_the_commands_of_the_script(script: str, workflow: str) -> None:
    commands = re.findall(r"^(?:run )?make (.+)$", (ROOT / ".ci" / script).read_text(), re.MULTILINE)
    assert load(ROOT / ".github/workflows" / workflow)["jobs"]["run"]["strategy"]["matrix"]["command"] == commands


def test_each_night_all_commands_run_and_the_failed_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/nightly", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text("test-howtos bench:\n\tfalse\n%:\n\t@echo did $@ $(MINUTES)\n")
    process = subprocess.run([tmp_path / ".ci/nightly"], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stdout.splitlines()[-2:] == ["failed: make test-howtos", "failed: make bench QUICK=1"]
    commands = re.findall(r"^run make (\S+)", (ROOT / ".ci/nightly").read_text(), re.MULTILINE)
    done = re.findall(r"^did (\S+)", process.stdout, re.MULTILINE)
    assert done == [command for command in commands if command not in ("test-howtos", "bench")]


@pytest.mark.parametrize(
    ("failed", "second", "status"),
    [
        (["tests/page/test_list.py::test_one[a-b]"], 0, 0),
        (["tests/page/test_list.py::test_one[a-b]"], 1, 1),
        (["tests/sdk/test_a.py::a", "tests/sdk/test_a.py::b", "tests/sdk/test_b.py::c"], 0, 0),
        ([f"tests/sdk/test_a.py::test_{number}" for number in range(4)], 0, 1),
        (["tests/sdk/test_a.py::a", "tests/guarantees/test_races.py::b"], 0, 1),
        (["tests/explorer/test_explorer.py::b"], 0, 1),
        ([], 0, 1),
    ],
)
def test_what_fails_by_chance_is_run_once_more_and_named(
    tmp_path: Path, failed: list[str], second: int, status: int
) -> None:
    """But no test of a guarantee, no more than three, and nothing that names no test."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    lines = "".join(f"\t@echo 'FAILED {name} - assert 1 < 0'\n" for name in failed)
    (tmp_path / "Makefile").write_text(f"test:\n{lines}\t@false\n%:\n\t@echo did $@\n")
    stand_in = tmp_path / ".venv/bin/pytest"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(f'#!/bin/sh\necho "again $@"\nexit {second}\n')
    stand_in.chmod(0o755)
    process = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True)
    assert process.returncode == status
    output = process.stdout.splitlines()
    assert (f"again {' '.join(failed)}" in output) == (status == 0 or second == 1)
    assert ("did test-postgresql" in output) == (status == 0)
    assert [line for line in output if "second try" in line] == (
        [f"passed at the second try: {name}" for name in failed] if status == 0 else []
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_only_read_the_repository(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for action in [step["uses"] for step in steps if "uses" in step]:
        assert re.fullmatch(r"actions/(checkout|setup-python|setup-java|setup-node|upload-artifact)@v\d+", action)


def test_the_sdk_is_tested_on_each_python_that_the_package_names() -> None:
    versions = load(ROOT / ".github/workflows/ci.yml")["jobs"]["sdk"]["strategy"]["matrix"]["python"]
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert versions == classifiers


def test_a_release_is_checked_on_each_python_that_the_package_names() -> None:
    steps = load(ROOT / ".github/workflows/release.yml")["jobs"]["build"]["steps"]
    (versions,) = [step["with"]["python-version"].split() for step in steps if "python-version" in step.get("with", {})]
    (default,) = re.findall(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert [f"python{version}" for version in sorted(versions)] == default.split()
    assert sorted(versions) == classifiers


def test_all_files_name_one_version_and_get_a_new_one_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, root: Path = tmp_path) -> str:
        monkeypatch.setattr("sys.argv", ["scripts.version", *arguments])
        version.main(root)
        *_, line = capsys.readouterr().out.splitlines(keepends=True)  # an earlier test's thread may have logged
        return line

    assert run(f"v{__version__}", root=ROOT) == f"{__version__}\n"
    for path in {path for path, _ in version.PLACES}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    assert run("--set", "1.10.0rc1") == "1.10.0rc1\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and f"lastbit:{__version__}" in path.read_text()]
    with pytest.raises(SystemExit, match=r"the tag of version 1\.10\.0rc1 is v1\.10\.0rc1, not v1\.10\.0"):
        run("v1.10.0")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("1.10.0rc1", "1.9.0"))
    with pytest.raises(SystemExit, match=r"disagree about the version:\n(.*\n)*1\.9\.0  Dockerfile"):
        run()
    dockerfile.write_text("FROM scratch")
    with pytest.raises(SystemExit, match="Dockerfile has nothing like"):
        run()


def test_pre_commit_runs_the_tools_of_lint() -> None:
    hooks = [hook for repository in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    tools = [hook["entry"].removeprefix(".venv/bin/") for hook in hooks if hook["language"] == "system"]
    for tool in re.findall(r"\$\(BIN\)/(ruff \w+|\S+)", recipe("lint")):
        assert any(entry.startswith(tool) for entry in tools), tool


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_what_github_requires(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["type"] == "markdown" or (part["id"] and part["attributes"]["label"])
