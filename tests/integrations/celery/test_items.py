"""The items that depend on a message, and a missing extra."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context

from lastbit.integrations.celery.current import item_of
from lastbit.integrations.celery.items import is_item, items_of_message
from tests.mutants import mutant
from tests.support.servers import ROOT

app = Celery("items", set_as_current=False)


def task(item: str | None = None) -> Any:
    return app.signature("task", options={} if item is None else {"task_id": item})


@pytest.mark.parametrize("text", ["7:0:1", "0:0:0", "9007199254740991:1:2"])
def test_ids_of_items(text: str) -> None:
    assert is_item(text)


@pytest.mark.parametrize("text", ["", "7:0", "07:0:1", "7:0:1 ", "7:0:9007199254740992", "d4f8-91", None, 7])
def test_other_ids(text: object) -> None:
    assert not is_item(text)


@pytest.mark.parametrize(
    ("embed", "items"),
    [
        ({}, []),
        ({"chain": None, "chord": None, "callbacks": None, "errbacks": [task("7:0:1")]}, []),
        ({"chain": [task("7:0:2"), task(), task("7:0:1")]}, ["7:0:2", "7:0:1"]),
        ({"chord": task("7:0:1")}, ["7:0:1"]),
        ({"callbacks": [task("7:0:1"), task("7:0:1")]}, ["7:0:1"]),
        ({"chain": [chain(task(), task("7:0:1"), app=app)]}, ["7:0:1"]),
        ({"chain": [group([task("7:0:1"), task("7:0:2")], app=app)]}, ["7:0:1", "7:0:2"]),
        ({"chain": [chord([task("7:0:1")], task("7:0:2"), app=app)]}, ["7:0:1", "7:0:2"]),
        ({"chord": task().set(chain=[task("7:0:1")])}, ["7:0:1"]),
        ({"callbacks": [app.signature("task", kwargs={"body": {"options": {"task_id": "7:0:1"}}})]}, []),
        (None, []),
    ],
)
def test_later_tasks_of_a_message(embed: Any, items: list[str]) -> None:
    assert items_of_message({"id": "d4f8-91"}, ([], {}, embed)) == items
    assert items_of_message({"id": "7:0:9"}, ([], {}, embed)) == ["7:0:9", *items]


@pytest.mark.parametrize("payload", [None, b"", 7, [], [1, 2]])
def test_any_payload_is_read(payload: object) -> None:
    assert items_of_message(None, payload) == []
    assert items_of_message({"id": "7:0:9"}, payload) == ["7:0:9"]


def test_protocol_1_has_the_id_in_its_body() -> None:
    assert items_of_message({}, {"id": "7:0:1", "callbacks": [task("7:0:2")]}) == ["7:0:1", "7:0:2"]


def test_a_missing_extra_is_named() -> None:
    program = "import sys; sys.modules['celery'] = None; import lastbit.integrations.celery"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "MissingExtra: lastbit.integrations.celery needs more than the bare client" in process.stderr
    assert "pip install 'lastbit[celery]'" in process.stderr


@mutant(
    "an-earlier-task-of-a-chain-knows-no-item",
    "lastbit.integrations.celery.current:item_of",
    "len(items) == 1",
    "False",
)
def test_an_earlier_task_works_for_the_item_of_its_chain() -> None:
    """Not if several items wait for its success: then it works for none of them alone."""

    def later(*items: str) -> Context:
        return Context(chain=[task(item) for item in items])

    assert item_of("7:0:1", later()) == "7:0:1"
    assert item_of("some id", later("7:0:1")) == "7:0:1"
    assert item_of("some id", later("7:0:1", "7:0:2")) is None
    assert item_of("some id", later()) is None
