"""`jobs/bulk_ack.py` in this process: everything that needs no spark-submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import bulk_ack
from lastbit import Client

pytestmark = pytest.mark.xdist_group("spark")


@pytest.mark.nightly
def test_text_json_and_orc_can_be_read(spark: Any, client: Client, tmp_path: Path, capsys: Any) -> None:
    """Each line of text is an id; several inputs are read as one."""
    batch = client.open(items=6, sealed=True)
    frame = spark.createDataFrame([(f"{batch.id}:0:{n}",) for n in range(6)], "item_id string")
    for kind, where in (("json", "item_id < '{0}:0:2'"), ("orc", "item_id >= '{0}:0:2'")):
        frame.where(where.format(batch.id)).write.format(kind).save(str(tmp_path / kind))
        assert bulk_ack.main(["--input", str(tmp_path / kind), "--format", kind, "--url", client.url]) == 0
    lines = tmp_path / "ids.txt"
    lines.write_text(f"{batch.id}:0:0\n")
    text = ["--input", str(lines), "--input", str(lines), "--format", "text", "--url", client.url]
    assert bulk_ack.main(text) == 0
    json_report, orc_report, text_report = map(json.loads, capsys.readouterr().out.splitlines())
    assert (json_report["applied"], orc_report["applied"]) == (2, 4)
    assert (text_report["rows"], text_report["repeated"], text_report["completed"]) == (2, 1, [batch.id])


def test_a_dry_run_counts_and_sends_nothing(spark: Any, tmp_path: Path, capsys: Any) -> None:
    """It needs no service; malformed rows are exit 3 as in a real run."""
    rows = [("7:0:0", "ok"), ("7:0:1", "ok"), ("7:0:1", "bad"), ("8:3:1", "bad"), ("nonsense", "ok"), ("9:9:9", "skip")]
    spark.createDataFrame(rows, "id string, state string").write.csv(str(tmp_path / "in"), header=True)
    arguments = [
        "--input",
        str(tmp_path / "in"),
        "--format",
        "csv",
        "--item-column",
        "id",
        "--where",
        "state <> 'skip'",
    ]
    assert (
        bulk_ack.main([*arguments, "--failed-when", "state = 'bad'", "--dry-run", "--url", "http://127.0.0.1:9"]) == 3
    )
    assert json.loads(capsys.readouterr().out) == {
        "dry_run": True,
        "rows": 5,
        "items": 3,
        "malformed": 1,
        "groups": 2,
        "batches": [7, 8],
    }


def test_exit_statuses_distinguish_wrong_use_from_failure(
    spark: Any, unused_port: int, tmp_path: Path, capsys: Any
) -> None:
    """2: no such input, no such token file, bad SQL; 1: a refusal by the service. Nothing on standard output."""
    spark.createDataFrame([("x",)], "item_id string").write.parquet(str(tmp_path / "in"))
    here, url = str(tmp_path / "in"), f"http://127.0.0.1:{unused_port}"
    for arguments in (
        ["--input", str(tmp_path / "nowhere"), "--url", url],
        ["--input", here, "--url", url, "--token-file", str(tmp_path / "none")],
        ["--input", here, "--url", url, "--where", "no such column"],
        ["--input", here, "--url", "nowhere"],
    ):
        assert bulk_ack.main(arguments) == 2
    with pytest.raises(SystemExit) as error_info:
        bulk_ack.main(["--format", "xml", "--input", here])
    assert error_info.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_token_is_read_from_its_file_and_may_be_refused(
    spark: Any, scripted_service: Any, tmp_path: Path, capsys: Any
) -> None:
    """The token is never on the command line; a service that refuses it is a failure, exit 1."""
    scripted_service.reply = lambda _: (401, {}, {"code": "unauthorized", "detail": "no such token"})
    spark.createDataFrame([("7:0:0",)], "item_id string").write.parquet(str(tmp_path / "in"))
    token = tmp_path / "token"
    token.write_text("secret-1\n")
    assert (
        bulk_ack.main(["--input", str(tmp_path / "in"), "--url", scripted_service.url, "--token-file", str(token)]) == 1
    )
    assert scripted_service.seen[0].headers["authorization"] == "Bearer secret-1"
    output = capsys.readouterr()
    assert "no such token" in output.err
    assert output.out == ""


def test_held_items_are_no_fault(spark: Any, client: Client, tmp_path: Path, capsys: Any) -> None:
    """Exit 0: their nested batches resolve them."""
    batch = client.open(items=1)
    client.open(items=1, parent=batch.ids[0])
    spark.createDataFrame([(batch.ids[0],)], "item_id string").write.parquet(str(tmp_path / "in"))
    assert bulk_ack.main(["--input", str(tmp_path / "in"), "--url", client.url]) == 0
    assert '"rejected": {"held": 1}' in capsys.readouterr().out


def test_a_strict_run_writes_the_rejects_and_sends_nothing(
    spark: Any, client: Client, tmp_path: Path, capsys: Any
) -> None:
    """Exit 3: the rows to check are written to a file."""
    batch = client.open(items=1)
    rows = [(f"{batch.id}:0:0", 1), ("x", 2)]
    spark.createDataFrame(rows, "item_id string, n int").write.parquet(str(tmp_path / "in"))
    arguments = [
        "--input",
        str(tmp_path / "in"),
        "--url",
        client.url,
        "--strict",
        "--rejects",
        str(tmp_path / "rejects"),
    ]
    assert bulk_ack.main(arguments) == 3
    assert [row.n for row in spark.read.json(str(tmp_path / "rejects")).collect()] == [2]
    assert batch.refresh().acked == 0
    assert "1 of 2 rows" in capsys.readouterr().err
