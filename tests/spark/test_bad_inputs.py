"""Bad input of real pipelines: truncated files, files of another kind or encoding, ids mixed with other values. The job
prints the error and its location in one line; it counts malformed rows; and it never reports success for bad input."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import bulk_ack, tally_stream
from lastbit import Client
from lastbit.ids import InvalidItemId, ItemId
from tests.fuzz.sizes import LONG, examples
from tests.spark.conftest import PYSPARK_35
from tests.support.servers import running_service, sqlite_file

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("spark"), pytest.mark.timeout(3600 if LONG else 300)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with sqlite_file() as url, running_service(url) as running, Client(running.url) as client_:
        yield client_


@pytest.fixture(scope="module")
def parquet(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file of 2,000 ids."""
    folder = tmp_path_factory.mktemp("good") / "out"
    rows = [(f"1:0:{number}", number) for number in range(2000)]
    spark.createDataFrame(rows, "item_id string, n int").coalesce(1).write.parquet(str(folder))
    return next(folder.glob("*.parquet")).read_bytes()


GOOD = b"item_id\n1:0:0\n"
GZ = gzip.compress(b"item_id\n" + b"".join(b"1:0:%d\n" % number for number in range(20_000)))

UNREADABLE: dict[str, tuple[str, str, bytes | Callable[[bytes], bytes], list[str], int, str]] = {
    "half a parquet file": ("parquet", "a.parquet", lambda good: good[: len(good) // 2], [], 1, "a.parquet"),
    "a parquet file with other bytes in it": (
        *("parquet", "a.parquet", lambda good: good[:40] + b"\xff" * 300 + good[340:], [], 1, "a.parquet"),
    ),
    "text that is called parquet": ("parquet", "a.parquet", b"item_id\n1:0:0\n", [], 1, "a.parquet"),
    "an empty file of parquet": ("parquet", "a.parquet", b"", [], 2, "schema"),
    "half a gz": ("csv", "a.csv.gz", GZ[: len(GZ) // 2], [], 1, "a.csv.gz"),
    "text that is called gz": ("csv", "a.csv.gz", GOOD, [], 1, "a.csv.gz"),
    "an orc file that is none": ("orc", "a.orc", b"ORCxx", [], 1, "rotocol"),
    "json that is none": ("json", "a.json", b"nope\n", [], 2, "item_id"),
    "bytes that are no text": ("json", "a.json", b"\xff\xfe{]]\n", [], 2, "item_id"),
    "a bad line that the caller forbids": ("json", "a.json", b"nope\n", ["--option", "mode=FAILFAST"], 1, "MALFORMED"),
    "an empty csv": ("csv", "a.csv", b"", [], 2, "item_id"),
    "a csv of another column": ("csv", "a.csv", b"id\n1:0:0\n", [], 2, "item_id"),
    "a column that is there twice": ("csv", "a.csv", b"item_id,item_id\n1:0:0,1:0:1\n", [], 2, "item_id"),
    "a byte order mark of UTF-16": ("csv", "a.csv", "item_id\n1:0:0\n".encode("utf-16"), [], 2, "item_id"),
    "ids that are numbers": ("json", "a.json", b'{"item_id":7}\n', [], 2, "not string"),
    "ids that are objects": ("json", "a.json", b'{"item_id":{"a":1}}\n', [], 2, "not string"),
    "ids that are lists": ("json", "a.json", b'{"item_id":["1:0:0"]}\n', [], 2, "not string"),
    "an encoding that is none": ("csv", "a.csv", GOOD, ["--option", "encoding=nonsense"], 2, "nonsense"),
    "an option that is none": ("csv", "a.csv", GOOD, ["--option", "sep="], 2, "elimiter"),
    "SQL that ends early": ("csv", "a.csv", GOOD, ["--where", "item_id +"], 2, "SYNTAX"),
    "SQL that fails at a row": ("csv", "a.csv", GOOD, ["--where", "raise_error(item_id) IS NULL"], 1, "1:0:0"),
    "SQL that is no condition": ("csv", "a.csv", GOOD, ["--failed-when", "item_id || 'x'"], 2, "not boolean"),
}

if PYSPARK_35:  # it reads the schema later, and some of its messages lack the file
    IN_35 = {
        "an empty file of parquet": (1, "a.parquet"),
        "half a gz": (1, "end of input stream"),
        "a bad line that the caller forbids": (1, "nope"),
    }
    UNREADABLE |= {name: (*UNREADABLE[name][:4], *expected) for name, expected in IN_35.items()}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_input_is_reported_in_one_line(
    spark: Any, client: Client, parquet: bytes, tmp_path: Path, capsys: Any, case: str
) -> None:
    """With the exit status of the job's page and the cause; nothing on standard output, and no traceback."""
    format_, name, content, more_arguments, status, expected_word = UNREADABLE[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content(parquet) if callable(content) else content)
    arguments = ["--input", str(tmp_path / "in"), "--format", format_, "--url", client.url, *more_arguments]
    assert bulk_ack.main(arguments) == status
    output = capsys.readouterr()
    assert output.out == ""
    lines = [line for line in output.err.splitlines() if line.startswith("bulk_ack: ")]
    assert any(str(tmp_path / "in") in line for line in lines)
    assert any(expected_word in line for line in lines), lines
    assert not any("\tat " in line or "Traceback" in line for line in lines)


def test_missing_input_is_reported_in_one_line(spark: Any, client: Client, tmp_path: Path, capsys: Any) -> None:
    """An empty folder, an unknown file system, an invalid pattern, an empty name."""
    (tmp_path / "empty").mkdir()
    for path, statuses in ((str(tmp_path / "empty"), {2}), ("nosuch://x/y", {1}), (f"{tmp_path}/[", {1}), ("", {2})):
        assert bulk_ack.main(["--input", path, "--url", client.url]) in statuses
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("bulk_ack: ") >= 2
        assert "Traceback" not in output.err


def test_a_token_that_is_not_a_text_is_wrong_use(tmp_path: Path, capsys: Any) -> None:
    """It was a key store, or the wrong file."""
    (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
    assert bulk_ack.main(["--input", "x", "--token-file", str(tmp_path / "token")]) == 2
    assert "token can't be read" in capsys.readouterr().err


def test_the_report_is_printed_though_the_rejects_cannot_be_written(
    spark: Any, client: Client, tmp_path: Path, capsys: Any
) -> None:
    """The valid ids are acked by then, and the report says so; the status shows that rows are missing."""
    batch = client.open(items=2)
    (tmp_path / "a.csv").write_text(f"item_id\n{batch.id}:0:0\nx\n")
    (tmp_path / "file").write_text("")
    arguments = ["--input", str(tmp_path / "a.csv"), "--format", "csv", "--url", client.url]
    for more in ([], ["--strict"]):
        assert bulk_ack.main([*arguments, "--rejects", str(tmp_path / "file" / "x"), *more]) == 1
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert (report["applied"], report["malformed"]) == (1, 1)
    assert output.err.count("can't be written to") == 2
    assert batch.refresh().acked == 1


def test_a_truncated_file_leaves_complete_masks_and_is_reported(
    spark: Any, client: Client, tmp_path: Path, capsys: Any
) -> None:
    """Next to valid files: some of their items may be acked, none twice, and a run after the repair acks the rest."""
    batch = client.open(items=40_000)
    ids = [f"{batch.id}:{number // 8192}:{number % 8192}\n" for number in range(40_000)]
    for part in range(2):
        (tmp_path / f"{part}.csv").write_text("item_id\n" + "".join(ids[part::2]))
    whole = gzip.compress(("item_id\n" + "".join(ids[:500])).encode())
    (tmp_path / "2.csv.gz").write_bytes(whole[:-200])
    arguments = ["--input", str(tmp_path), "--format", "csv", "--url", client.url]
    assert bulk_ack.main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert PYSPARK_35 or "2.csv.gz" in output.err
    assert "some items may be acked" in output.err
    (tmp_path / "2.csv.gz").write_bytes(whole)
    assert bulk_ack.main(arguments) == 0
    assert batch.refresh().acked == 40_000
    assert batch.verify().ok


ODD = st.one_of(
    st.sampled_from(
        [
            *("", " ", "1:0", "1:0:01", "1:0:+1", "1:0:-0", " 1:0:1", "1:0:1 ", "1:0:1\t", "1:0:1\x00", "null", "NULL"),
            *(
                "1:0:1\n",
                "1:0:\n1",
                "\ufeff1:0:1",
                "\u0661:0:1",
                "1:0:\uff11",
                "1:0:1.0",
                "1:0:1e1",
                '"1:0:1"',
                "'1:0:1'",
            ),
            *(f"{2**53}:0:0", f"1:0:{2**53}", f"{2**53 - 1}:0:0", f"1:{2**53 - 1}:{2**53 - 1}", "9" * 50_000, "1,0,1"),
            *("1:0:1,", "1:0:1\\", '1:0:"1', "1:0:1\r", "1:0:1:0", "\u00a01:0:1", "1:0:1\u2028", "\U0001f600"),
        ]
    ),
    st.text(alphabet="0123456789:-+ ", max_size=9),
    st.text(st.characters(codec="utf-8"), max_size=6),
)
IDS = st.builds(lambda *parts: ":".join(map(str, parts)), st.integers(1, 3), st.integers(0, 2), st.integers(0, 40_000))
ROWS = st.lists(st.one_of(IDS, IDS, ODD), min_size=1, max_size=60)


def counted(ids: list[str | None]) -> dict[str, Any]:
    """A dry run's counts of these rows, by the SDK's own parser."""
    good = set()
    malformed = 0
    for text in ids:
        try:
            good.add(ItemId.parse(text or ""))
        except InvalidItemId:
            malformed += 1
    return {
        "dry_run": True,
        "rows": len(ids),
        "items": len(good),
        "malformed": malformed,
        "groups": len({item[:2] for item in good}),
        "batches": sorted({item.batch for item in good}),
    }


def as_csv(ids: list[str]) -> tuple[bytes, list[str]]:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([["item_id", "more"], *([item, "x"] for item in ids)])
    return text.getvalue().encode(), ["--option", 'escape="', "--option", "multiLine=true", "--option", "lineSep=\n"]


def as_json(ids: list[str]) -> tuple[bytes, list[str]]:
    return b"".join(json.dumps({"item_id": item}).encode() + b"\n" for item in ids), []


@given(ids=ROWS, kind=st.sampled_from([as_csv, as_json]))
@examples(6, 300)
def test_ids_among_other_values_are_counted_as_by_the_parser(
    spark: Any, tmp_path_factory: pytest.TempPathFactory, capsys: Any, ids: list[str], kind: Any
) -> None:
    """Quotes, newlines, blanks, huge lines, digits of other scripts: each row is an id or malformed, and none is
    lost."""
    content, options = kind(ids)
    path = tmp_path_factory.mktemp("rows") / "a"
    path.write_bytes(content)
    name = kind.__name__.removeprefix("as_")
    capsys.readouterr()
    expected = counted(ids)
    status = bulk_ack.main(["--input", str(path), "--format", name, "--dry-run", *options])
    assert json.loads(capsys.readouterr().out) == expected
    assert status == (3 if expected["malformed"] else 0)


@pytest.mark.parametrize(
    ("content", "schema", "status"),
    [
        (b'{"topic":"t","partition":0,"robot":"r"}\n', "topic string, partition int, offset bigint, robot string", 2),
        (b'{"topic":"t","partition":0,"offset":1}\n', "topic string, partition int, offset bigint", 2),
        (b'{"topic":"t"}\n', "topic nonsense", 2),
    ],
)
def test_a_stream_that_cannot_be_counted_is_reported_in_one_line(
    spark: Any, client: Client, tmp_path: Path, capsys: Any, content: bytes, schema: str, status: int
) -> None:
    """No offset, no such column, no such type; nothing is counted."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_bytes(content)
    arguments_ = [
        "--tally",
        "bad",
        "--checkpoint",
        str(tmp_path / "c"),
        "--format",
        "json",
        "--input",
        str(tmp_path / "in"),
    ]
    assert tally_stream.main([*arguments_, "--schema", schema, "--key", "robot", "--url", client.url]) == status
    output = capsys.readouterr()
    assert output.out == ""
    lines = [line for line in output.err.splitlines() if line.startswith("tally_stream: ")]
    assert lines
    assert not any("\tat " in line or "Traceback" in line for line in lines)
