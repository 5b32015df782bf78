"""The TypeScript client: its own tests with a live service, its types with the compiler, and its package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from playwright.sync_api import Route

from scripts.node_packages import install
from tests.page.browser import program, running_browser
from tests.support.servers import ROOT, running_service, sqlite_file

PACKAGE: Final = ROOT / "clients" / "typescript"
# One process, so that no two tests install at the same time.
pytestmark = pytest.mark.xdist_group("typescript")


def run(*command: str, cwd: Path = PACKAGE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def package() -> Path:
    """The package with its tools installed."""
    install(PACKAGE, PACKAGE)
    return PACKAGE


def test_versions_and_licence_match_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    content = json.loads((PACKAGE / "package.json").read_text())
    assert content["version"] == project["version"]
    assert "dependencies" not in content
    assert (PACKAGE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "scripts" / "openapi_lint"], ids=lambda path: path.name)
def test_npm_packages_are_locked_by_version_and_hash(folder: Path) -> None:
    """And not by an address, so that a mirror can serve them."""
    content = json.loads((folder / "package.json").read_text())
    for version in [*content.get("dependencies", {}).values(), *content.get("devDependencies", {}).values()]:
        assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version)
    text = (folder / "package-lock.json").read_text()
    assert "://" not in text
    locked = json.loads(text)["packages"]
    for name in ("dependencies", "devDependencies"):
        assert locked[""].get(name) == content.get(name)
    assert all(package.get("integrity", "").startswith("sha512-") for name, package in locked.items() if name)


def test_the_generated_types_name_all_operations() -> None:
    """Quick, and without Node; `test_the_generated_types_are_current` compares everything."""
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text())
    text = (PACKAGE / "src" / "schema.ts").read_text()
    operations = text[text.index("export interface operations {") :]
    expected = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert sorted(re.findall(r"^    (\w+): \{$", operations, re.MULTILINE)) == sorted(expected)


@pytest.mark.nightly
def test_the_generated_types_are_current(package: Path, tmp_path: Path) -> None:
    """After a change of openapi.yaml: `npm run generate` in clients/typescript."""
    command = json.loads((package / "package.json").read_text())["scripts"]["generate"].split()
    command[command.index("src/schema.ts")] = str(tmp_path / "schema.ts")
    generated = run("npx", "--no-install", *command)
    assert generated.returncode == 0, generated.stderr
    assert (package / "src" / "schema.ts").read_text() == (tmp_path / "schema.ts").read_text()


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    with sqlite_file() as url, running_service(url) as service:
        yield service.url


@pytest.mark.nightly
def test_the_clients_own_tests_pass(package: Path, service_url: str) -> None:
    """With a live service: the flow, retries, the acker, and the programs of its README."""
    result = run("npm", "test", LASTBIT_URL=service_url)
    assert result.returncode == 0, result.stdout + result.stderr
    count = re.search(r"^# pass (\d+)$", result.stdout, re.MULTILINE)
    assert count is not None, result.stdout
    assert int(count[1]) >= 39


BODIES: Final = """\
import type { components } from "lastbit";
type Acks = components["schemas"]["Acks"];
export const accepted: Acks[] = [{ items: ["1:0:0"] }, { groups: [] }, { items: [], groups: [] }];
export const misspelt: Acks = { itmes: [] };
export const empty: Acks = {};
"""


@pytest.mark.nightly
def test_the_package_works_in_an_empty_project(package: Path, service_url: str, tmp_path: Path) -> None:
    """It has only the built files; and the strict compiler refuses a misspelt body."""
    packed = run("npm", "pack", "--silent", "--pack-destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.glob("*.tgz")
    folder = tmp_path / "node_modules" / "lastbit"
    folder.mkdir(parents=True)
    shutil.unpack_archive(archive, tmp_path)
    (tmp_path / "package").rename(folder.parent / "unpacked")
    folder.rmdir()
    (folder.parent / "unpacked").rename(folder)
    names = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    assert names == {"LICENSE", "README.md", "dist", "package.json"}

    program = 'import { Client } from "lastbit"; console.log((await new Client().open({ items: 2 })).ids.size);'
    process_ = run("node", "--input-type=module", "--eval", program, cwd=tmp_path, LASTBIT_URL=service_url)
    assert (process_.stdout, process_.stderr) == ("2\n", "")

    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "bodies.ts").write_text(BODIES)
    programs = re.findall(r"^```js\n(.*?)^```", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert programs
    for number, text in enumerate(programs):
        (tmp_path / f"program_{number}.ts").write_text(text)
    sources = sorted(path.name for path in tmp_path.glob("*.ts"))
    options = ("--noEmit", "--strict", "--module", "nodenext", "--target", "es2022")
    compiled = run(str(package / "node_modules" / ".bin" / "tsc"), *options, *sources, cwd=tmp_path)
    assert "program_" not in compiled.stdout, compiled.stdout
    errors = re.findall(r"^bodies\.ts\((\d+),", compiled.stdout, re.MULTILINE)
    assert errors == ["4", "5"], compiled.stdout
    assert "'itmes' does not exist in type" in compiled.stdout


FLOW: Final = """\
async () => {
  const { Client } = await import("/dist/index.js");
  const client = new Client({ url: location.origin });
  const batch = await client.open({ key: "browser", items: 200, groupSize: 64 });
  const acker = client.acker();
  const acked = [...batch.ids.slice(0, 10)].map((id) => acker.ack(id));
  await Promise.all(acked);
  await acker.close();
  await client.ack(batch.ids.slice(10, -1));
  await client.fail(batch.ids.at(-1), "why");
  const sealed = await batch.seal();
  const ended = await batch.wait({ timeout: 10, signal: AbortSignal.timeout(20_000) });
  const refused = await batch.extend(1).catch((error) => error.name);
  return [sealed.newly, ended.state, ended.acked, ended.failed, refused];
}
"""


@pytest.mark.nightly
def test_the_client_runs_in_a_browser(package: Path, service_url: str) -> None:
    """In Chromium, on a page of the service's own origin."""
    path = program()
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("chromium is not installed")
    built = run("npm", "run", "build")
    assert built.returncode == 0, built.stdout
    with running_browser(path) as browser:
        page = browser.new_page()

        def served(route: Route) -> None:
            file = package / "dist" / route.request.url.rpartition("/")[2]
            route.fulfill(body=file.read_text(), content_type="text/javascript")

        page.route("**/client.html", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.route("**/dist/*.js", served)
        page.goto(f"{service_url}/client.html")
        assert page.evaluate(FLOW) == [True, "complete", 199, 1, "BatchEnded"]
