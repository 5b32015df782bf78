"""The public names of `lastbit` and the cost of importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lastbit

EXPORTED = [
    "AckResult",
    "Acker",
    "AckerClosed",
    "Appended",
    "AsyncAcker",
    "AsyncBatchHandle",
    "AsyncClient",
    "AsyncTally",
    "AsyncTallyBuffer",
    "AsyncWebhooks",
    "Attempt",
    "Batch",
    "BatchCounts",
    "BatchEnded",
    "BatchHandle",
    "BatchNotFound",
    "BatchSealed",
    "BufferClosed",
    "Callback",
    "Client",
    "ClientClosed",
    "Completed",
    "Conflict",
    "ConsumerGroupInUse",
    "ConsumerGroupNotFound",
    "Counted",
    "CreatedWebhook",
    "DatabaseUnreachable",
    "Delivery",
    "Event",
    "EventPage",
    "Explanation",
    "Extended",
    "FailedRange",
    "Failure",
    "FailureReason",
    "FailureReasons",
    "Fence",
    "Forbidden",
    "HistoryPoint",
    "Hop",
    "IdempotencyKeyReused",
    "InstanceNotFound",
    "InvalidArgument",
    "InvalidItemId",
    "InvalidRequest",
    "ItemId",
    "ItemIds",
    "ItemRejected",
    "ItemResolved",
    "LastbitError",
    "MalformedItem",
    "MessagesDiffer",
    "MessagesRefused",
    "MissingExtra",
    "NoCurrentItem",
    "NotFound",
    "NotRefreshed",
    "Opened",
    "OpenedCallback",
    "OutOfOrder",
    "PartitionsFixed",
    "PendingRange",
    "PositionTrimmed",
    "ProcessNotFound",
    "RangeResult",
    "RateLimited",
    "Reason",
    "Redrive",
    "Redriven",
    "Rejected",
    "Repair",
    "Retry",
    "RotatedWebhook",
    "SchemaMismatch",
    "Sealed",
    "ServiceError",
    "ServiceUnreachable",
    "SessionReplaced",
    "SkippedRange",
    "Source",
    "SourceChain",
    "SourceRewound",
    "StaleEpoch",
    "StateCounts",
    "SubCounter",
    "Tally",
    "TallyApplied",
    "TallyBuffer",
    "TallyEntry",
    "TallyRange",
    "TallyTotal",
    "TallyValue",
    "Tested",
    "TooLarge",
    "TreeProgress",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "UsedAfterFork",
    "Verification",
    "VersionConflict",
    "WaitTimeout",
    "Watermark",
    "Webhook",
    "WebhookNotFound",
    "Webhooks",
    "__version__",
    "item_id",
]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_public_names_are_unchanged() -> None:
    """Adding or removing a name is a decision, not an accident."""
    assert lastbit.__all__ == EXPORTED
    assert set(EXPORTED) <= set(dir(lastbit))


def test_every_public_name_can_be_imported() -> None:
    """The lazy look-up knows each name; `from lastbit import *` works."""
    for name in EXPORTED:
        assert getattr(lastbit, name) is not None
    namespace: dict[str, object] = {}
    exec("from lastbit import *", namespace)
    assert set(EXPORTED) <= set(namespace)


@pytest.mark.parametrize("package", ["lastbit", "lastbit.streams", "lastbit.processes", "lastbit.integrations.airflow"])
def test_type_checkers_see_the_same_names(package: str) -> None:
    """Each stub imports the names of its package, from the modules that define them."""
    module = import_module(package)
    stub = ast.parse(Path(module.__file__ or "").with_suffix(".pyi").read_text())
    imports = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = {name: (home, name) for home, defined in module._HOMES.items() for name in defined}
    assert imports == names
    assert set(module.__all__) - {"__version__"} == set(names)


def test_every_error_is_public() -> None:
    """Callers can name every error they catch."""
    from lastbit import errors

    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(lastbit.__all__)
    assert all(name in (errors.__doc__ or "") for name in tree - {"InvalidItemId"})


def test_ids_need_only_the_standard_library() -> None:
    """httpx is imported when a client is first named, not before; nor is anything else outside the standard library."""
    code = (
        "import sys, lastbit; assert len(lastbit.ItemIds(7, 64, range(9))) == 9; lastbit.LastbitError; "
        "import sysconfig; print('httpx' in sys.modules, 'rich' in sys.modules, 'click' in sys.modules); "
        "lastbit.Client; print('httpx' in sys.modules)"
    )
    assert run(code).split() == ["False", "False", "False", "True"]


def test_ids_work_where_httpx_is_not_installed() -> None:
    """As on an executor that has the package's zip and nothing else."""
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from lastbit import ItemIds, item_id\n"
        "print(item_id(7, 8192), ItemIds(7, 64, range(65))[-1])"
    )
    assert run(code).split() == ["7:1:0", "7:1:0"]


def test_the_client_needs_neither_click_nor_rich() -> None:
    """A progress bar without them raises an error that names the extra to install, before anything is sent."""
    code = (
        "import sys; sys.modules['click'] = sys.modules['rich'] = None\n"
        "from lastbit import Client, MissingExtra\n"
        "try: Client('http://127.0.0.1:9').batch(7).wait(progress=True)\n"
        "except MissingExtra as error: print(error)"
    )
    assert "pip install 'lastbit[cli]'" in run(code)


def test_the_command_names_the_extra_to_install() -> None:
    """With only the bare client installed, the command prints a message, not a traceback."""
    code = "import sys; sys.modules['click'] = None\nfrom lastbit.__main__ import main\nmain()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'lastbit[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As with any module."""
    assert not hasattr(lastbit, "Cleint")


def test_the_version_matches_the_distribution() -> None:
    """One version, in the code and in pip's metadata."""
    from importlib.metadata import version

    assert lastbit.__version__ == version("lastbit")
