"""The alert rules: promtool accepts and tests them, and they use metrics that a service has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import need
from tests.support.servers import ROOT, running_service, sqlite_file

FOLDER = ROOT / "deploy/prometheus"
RULES = FOLDER / "alerts.yml"
TESTS = FOLDER / "alerts.test.yml"


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    need("prometheus", shutil.which("promtool") is not None)
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


def test_prometheus_accepts_the_rules() -> None:
    process = promtool("check", "rules", RULES)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{len(rules())} rules found" in process.stdout


@pytest.mark.slow
def test_each_rule_is_silent_or_fires_as_in_its_test(tmp_path: Path) -> None:
    process = promtool("test", "rules", TESTS)
    assert process.returncode == 0, process.stdout + process.stderr
    # Each rule has a test that fires, and without the rules' conditions the tests fail.
    tests = [part for test in yaml.safe_load(TESTS.read_text())["tests"] for part in test["alert_rule_test"]]
    assert {part["alertname"] for part in tests if part.get("exp_alerts")} == {rule["alert"] for rule in rules()}
    # And that test fails without its alert.
    shutil.copy(TESTS, tmp_path)
    (tmp_path / RULES.name).write_text(re.sub(r"alert: (\w+)", r"alert: Not\1", RULES.read_text()))
    process = promtool("test", "rules", tmp_path / TESTS.name)
    failed = set(re.findall(r"alertname: (\w+)", process.stdout + process.stderr))
    assert failed == {rule["alert"] for rule in rules()}


def test_the_rules_name_metrics_and_labels_that_the_service_has() -> None:
    with sqlite_file() as url, running_service(url) as service:
        text = httpx.get(f"{service.url}/metrics").text
    types = dict(re.findall(r"^# TYPE (lastbit_\w+) (\w+)$", text, re.MULTILINE))
    series = set(types)
    for name, kind in types.items():
        series |= {f"{name}_{end}" for end in ("bucket", "count", "sum")} if kind == "histogram" else set()
    used_names = {name for rule in rules() for name in re.findall(r"\blastbit_\w+", rule["expr"])}
    assert used_names <= series
    pairs = {pair for rule in rules() for pair in re.findall(r'(\w+)="([a-z_]+)"', rule["expr"])} - {("job", "lastbit")}
    shown_pairs = set(re.findall(r'(\w+)="([a-z_]+)"', text))
    # A service without consumer groups has no such series.
    assert pairs - shown_pairs == {("state", "free")}


def test_each_metric_that_should_be_watched_has_a_rule() -> None:
    table = (ROOT / "docs/metrics.md").read_text().partition("## When to alert")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(lastbit_\w+)`", table))
    assert len(listed) > 10
    expressions = " ".join(rule["expr"] for rule in rules())
    assert {name for name in listed if name not in expressions} == set()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_rule_links_to_a_section(rule: dict[str, dict[str, str]]) -> None:
    name, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors
