"""Clients that generators write from openapi.yaml: `make test-generated`.

Those for Go, Java, TypeScript, C#, Rust and Python are written. Those for Java, TypeScript and Python are compiled too,
and the last two talk to a service. The others would need packages of registries that the other tests don't use."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from scripts.node_packages import install
from tests.support.servers import ROOT, running_service, sqlite_file

GENERATORS: Final = ROOT / ".venv-generators" / "bin"
TYPESCRIPT: Final = ROOT / "clients" / "typescript"
DOCUMENT: Final = ROOT / "openapi.yaml"
LANGUAGES: Final = {
    "csharp": (),
    "go": (),
    "java": ("--library", "native", "--additional-properties", "openApiNullable=false,useJakartaEe=true"),
    "rust": (),
    "typescript-fetch": (),
}
"""The generators, with the options that save a package."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """What the command printed."""
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout + result.stderr


Clients = Callable[[str], Path]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """The folder of the client for a language. What a generator prints as an error isn't in its exit status."""

    @functools.cache
    def client(language: str) -> Path:
        folder = tmp_path_factory.mktemp(language)
        if language == "python":
            options = ("--path", DOCUMENT, "--output-path", folder / "generated", "--meta", "none")
            path = f"{GENERATORS}:{os.environ['PATH']}"  # it formats with ruff
            output = run(GENERATORS / "openapi-python-client", "generate", *options, PATH=path)
            assert not re.search("parsing|Unable", output), output
        else:
            options = ("-g", language, "-i", DOCUMENT, "-o", folder, *LANGUAGES[language])
            output = run(GENERATORS / "openapi-generator-cli", "generate", *options)
            assert " ERROR " not in output, output
        return folder

    return client


@pytest.mark.parametrize("language", [*LANGUAGES, "python"])
def test_each_operation_and_schema_has_its_code(clients: Clients, language: str) -> None:
    """Under its own name, in the style of the language."""
    document: dict[str, Any] = yaml.safe_load(DOCUMENT.read_text())
    sources = {path: path.read_text() for path in clients(language).rglob("*.*") if path.suffix in SUFFIXES}
    text = re.sub("[^a-z0-9]", "", " ".join(sources.values()).lower())
    operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(operations) > 60
    names = [*operations, *(name for name, schema in document["components"]["schemas"].items() if is_object(schema))]
    assert [name for name in names if name.replace("_", "").lower() not in text] == []


SUFFIXES: Final = (".cs", ".go", ".java", ".rs", ".ts", ".py")


def is_object(schema: dict[str, Any]) -> bool:
    """An object without fields, and a choice of others, needs no type of its own."""
    return bool(schema.get("properties"))


def test_java_compiles(clients: Clients, tmp_path: Path) -> None:
    """With the packages that it needs; PySpark brings them."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    jars = Path(spec.origin).parent / "jars"
    sources = sorted((clients("java") / "src" / "main").rglob("*.java"))
    assert len(sources) > 100
    (tmp_path / "sources").write_text("\n".join(map(str, sources)))
    run("javac", "-nowarn", "-proc:none", "-cp", f"{jars}/*", "-d", tmp_path / "classes", f"@{tmp_path / 'sources'}")


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    with sqlite_file() as url, running_service(url) as service:
        yield service.url


EXPECTED: Final = "3 complete true complete\n"
"""The number of the items that were extended from, the batch's state, whether the seal completed it, and why."""

TYPESCRIPT_FLOW: Final = """\
import { AcksApi, BatchesApi, Configuration } from "./index";
declare const process: { env: { LASTBIT_URL: string } };

async function main(): Promise<void> {
    const configuration = new Configuration({ basePath: process.env.LASTBIT_URL });
    const batches = new BatchesApi(configuration);
    const { id } = await batches.openBatch({ openBody: { key: "typescript", items: 3 } });
    const { start } = await batches.extendBatch({ id, extendBody: { count: 1 } });
    const items = [0, 1, 2, 3].map((index) => `${id}:0:${index}`);
    await new AcksApi(configuration).ackItems({ acks: { items } });
    const { state, newly } = await batches.sealBatch({ id, body: {} });
    const { reasons } = await batches.explainBatch({ id });
    console.log(start, state, newly, reasons[0].code);
}
main();
"""


def test_typescript_compiles_and_completes_a_batch(clients: Clients, service_url: str, tmp_path: Path) -> None:
    """With the strict compiler."""
    install(TYPESCRIPT, TYPESCRIPT)
    folder = clients("typescript-fetch")
    (folder / "flow.ts").write_text(TYPESCRIPT_FLOW)
    options = ("--strict", "--target", "es2022", "--lib", "es2022,dom", "--module", "commonjs")
    run(TYPESCRIPT / "node_modules" / ".bin" / "tsc", *options, "--outDir", tmp_path, "flow.ts", cwd=folder)
    assert run("node", tmp_path / "flow.js", LASTBIT_URL=service_url) == EXPECTED


PYTHON_FLOW: Final = """\
import importlib
import os
import pkgutil

import generated
from generated import AuthenticatedClient
from generated.api.acks import ack_items
from generated.api.batches import explain_batch, extend_batch, open_batch, seal_batch
from generated.models import AcksByItem, ExtendBody, OpenBody

for module in pkgutil.walk_packages(generated.__path__, "generated."):
    importlib.import_module(module.name)
client = AuthenticatedClient(base_url=os.environ["LASTBIT_URL"], token="none")
batch = open_batch.sync(client=client, body=OpenBody(key="python", items=3)).id
start = extend_batch.sync(batch, client=client, body=ExtendBody(count=1)).start
ack_items.sync(client=client, body=AcksByItem(items=[f"{batch}:0:{index}" for index in range(4)]))
sealed = seal_batch.sync(batch, client=client)
explanation = explain_batch.sync(batch, client=client)
print(start, sealed.state, str(sealed.newly).lower(), explanation.reasons[0].code)
"""


def test_python_completes_a_batch(clients: Clients, service_url: str) -> None:
    """And all of its modules can be imported."""
    output = run(GENERATORS / "python", "-c", PYTHON_FLOW, cwd=clients("python"), LASTBIT_URL=service_url)
    assert output == EXPECTED
