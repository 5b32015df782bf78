"""Examples for the OpenAPI document: each error by its code, and request bodies by operation.

A new service accepts the request bodies in the order of this file, if their paths name resources that earlier requests
made."""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import Any, Final

import msgspec

from api import problems
from api.access.rules import unauthorized
from api.problems import Place, Problem
from core import errors
from lastbit.ids import ItemId
from lastbit.streams.snapshot import Snapshot

_PROBLEMS: Final = (
    unauthorized(has_token=False),
    Problem("forbidden", "this route requires the role produce or admin; the token dashboard has read"),
    Problem("rate_limited", "the token importer may make 50 calls a second"),
    Problem("too_large", "body: expected at most 8,388,608 bytes"),
    Problem("unsupported_media_type", "header Content-Type: expected application/json, got text/plain"),
    problems.invalid([Place("body.count", "this field is required")]),
    *(
        problems.from_core(error)
        for error in (
            errors.IdempotencyKeyReused("catalog-42", "it opened batch 7"),
            errors.StepReused("body.commands[0].step", "report", "order-1001-paid", "order-1001-packed"),
            errors.BatchNotFound(7),
            errors.GroupNotFound(7, 2, 1),
            errors.BatchSealed(7, "extend"),
            errors.BatchComplete(7, "extend"),
            errors.BatchExpired(7, "extend"),
            errors.BatchCancelled(7, "extend"),
            errors.ItemResolved(ItemId(7, 0, 3)),
            errors.BatchLive(7, "open"),
            errors.StateConflict(7, "open", "expired"),
            errors.NothingFailed(7),
            errors.NothingPending(7),
            errors.WebhookNotFound(3),
            errors.WebhookDisabled(3),
            errors.PositionTrimmed(100, 2500),
            errors.OutOfOrder("body.entries[0]", "blue", (16, 0), (17, 0)),
            errors.SourceConflict("body.ranges[0]", "blue", ("parts", 0, 0), "entries"),
            errors.ConsumerGroupNotFound("render"),
            errors.ConsumerGroupInUse("render", 2),
            errors.PartitionsFixed("render", 16),
            errors.SessionReplaced("render", "worker-1"),
            errors.StaleEpoch("render", 5, "worker-1", 3),
            errors.ProcessNotFound("shipping"),
            errors.InstanceNotFound("shipping", "order-1001"),
            errors.VersionConflict("shipping", "order-1001", 1, 2),
            errors.UpgradeNotFinished("0010"),
            errors.Overloaded("10,000 acks are waiting already"),
        )
    ),
)


def of_problems() -> dict[str, Any]:
    """The value of `components.examples`: each problem by its code."""
    return {
        problem.code: {
            "summary": HTTPStatus(problem.status).phrase,
            "value": msgspec.json.decode(problem.body()),
        }
        for problem in _PROBLEMS
    }


_FENCE: Final = {"worker": "worker-1", "epoch": 1}
_SNAPSHOT: Final = base64.b64encode(Snapshot().encode()).decode()

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "append_events": {
        "An event": {
            "events": [{"id": "order-1001-paid", "type": "order.paid", "key": "order-1001", "data": {"total": 120}}]
        }
    },
    "open_batch": {
        "A batch to extend": {"key": "catalog-42", "labels": {"team": "search"}},
        "With items": {"key": "catalog-43", "items": 1000, "group_size": 64, "expires_in": 86400},
        "As an item of another batch": {"key": "catalog-43-images", "parent": "2:0:5"},
    },
    "extend_batch": {
        "A thousand items": {"count": 1000},
        "On behalf of an item": {"count": 12, "by": "1:0:3"},
    },
    "ack_items": {
        "By id": {"items": ["1:0:0", "1:0:1"]},
        "By bitfield": {"groups": [{"batch": 1, "group": 0, "bits": "/w=="}]},
        "Both": {"items": ["1:0:8"], "groups": [{"batch": 2, "group": 0, "bits": "Aw=="}]},
    },
    "fail_items": {
        "By id, with a reason": {"items": ["1:0:9"], "reason": "the picture is missing"},
        "By bitfield": {"groups": [{"batch": 2, "group": 1, "bits": "AQ=="}]},
    },
    "skip_items": {
        "By id, with a reason": {"items": ["1:0:10"], "reason": "the customer has left"},
        "By bitfield": {"groups": [{"batch": 2, "group": 1, "bits": "AQ=="}]},
    },
    "update_batch": {
        "Tolerate more": {"tolerated_failure_percentage": 5},
        "Another deadline": {"deadline": "2027-05-04T17:30:00Z"},
        "Labels": {"labels": {"team": "search", "trial": None}},
    },
    "redrive_batch": {
        "Everything that failed": {},
        "What failed for one reason": {"reason": "the picture is missing", "note": "the disk is back"},
        "Some items": {"items": ["1:0:9"]},
        "What is pending": {"pending": True},
    },
    "repair_batch": {"Look first": {"dry_run": True}, "Repair": {}},
    "seal_batch": {"No fields": {}},
    "cancel_batch": {
        "Just end it": {},
        "With all below it": {"reason": "the catalog is a wrong one", "children": True},
    },
    "reopen_batch": {
        "As it was": {},
        "With another deadline": {"deadline": "2027-05-04T17:30:00Z", "reason": "the disk is back"},
    },
    "put_consumer_group": {"Sixteen partitions": {"partitions": 16, "ttl": 10, "release": 30}},
    "sync_worker": {
        "Join": {"worker": "worker-1", "session": "5f0c7a31"},
        "Give a partition back": {
            "worker": "worker-1",
            "session": "5f0c7a31",
            "drained": [{"partition": 5, "epoch": 1}],
            "capacity": 8,
        },
    },
    "commit_position": {"A window without gaps": {**_FENCE, "snapshot": _SNAPSHOT, "head": 120}},
    "commit_positions": {
        "Two partitions": {
            "worker": "worker-1",
            "positions": [{"partition": number, "epoch": 1, "snapshot": _SNAPSHOT, "head": 120} for number in (5, 6)],
        },
    },
    "apply_entries": {
        "One message": {
            "entries": [{"key": "blue", "delta": 5, "source": {"topic": "screws", "partition": 0, "offset": 17}}]
        },
    },
    "apply_ranges": {
        "The sums of a thousand messages": {
            "ranges": [
                {
                    "topic": "screws",
                    "partition": 0,
                    "after": "4711",
                    "upto": "5711",
                    "totals": {"blue": 2031, "red": 977},
                }
            ]
        },
        "The first messages of a source": {
            "ranges": [{"topic": "screws", "partition": 1, "after": None, "upto": "17", "totals": {"blue": 5}}]
        },
    },
    "put_process": {"A process": {"partitions": 16, "after": 0}},
    "handle_events": {
        "Two instances": {
            "handlings": [
                {
                    "instance": name,
                    "event": {"id": event, "position": 1},
                    "fence": _FENCE,
                    "version": 0,
                    "state": {"paid": True},
                }
                for name, event in (("order-1002", "order-1002-paid"), ("order-1003", "order-1003-paid"))
            ]
        },
    },
    "handle_event": {
        "New state and a command": {
            "event": {"id": "order-1001-paid", "position": 1},
            "fence": _FENCE,
            "version": 0,
            "state": {"paid": True},
            "commands": [{"type": "ship", "data": {"order": 1001}}],
            "timers": [{"timer": "reminder", "after": 3600}],
        },
    },
    "count_unnamed_events": {"Two events": {"after": 0, "upto": 12, "count": 2}},
    "retry_parked_events": {"All of them": {}, "One of them": {"event": "order-1001-paid"}},
    "create_webhook": {
        "Completed batches": {"url": "https://hooks.example.com/lastbit", "types": ["batch.completed"], "label": "ops"}
    },
    "rotate_webhook_secret": {
        "A day for the receivers": {},
        "The old secret is known to others": {"overlap_seconds": 0},
    },
    "redeliver_webhook": {"All that are dead": {}, "One event": {"position": 1}},
    "send_test_event": {"No fields": {}},
}
"""Request bodies by operation id, then by summary."""


def of_requests(operation: str) -> dict[str, Any]:
    """The examples of an operation's request body."""
    return {
        f"{operation}_{number}": {"summary": summary, "value": value}
        for number, (summary, value) in enumerate(REQUESTS[operation].items(), 1)
    }


_PARAMETERS: Final = {
    "id": 7,
    "partition": 5,
    "worker": "worker-1",
    "tally": "screws",
    "key": "blue",
    "process": "shipping",
    "instance": "order-1001",
    "Idempotency-Key": "catalog-42",
}


def of_parameter(parameter: dict[str, Any]) -> Any:
    """The example of a path parameter or a header, or None."""
    if parameter["in"] == "query":
        return None
    if parameter["name"] == "group":  # an item group's number, or a consumer group's name
        return 0 if parameter["schema"]["type"] == "integer" else "render"
    return _PARAMETERS.get(parameter["name"])
