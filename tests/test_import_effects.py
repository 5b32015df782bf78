"""What an import of the service's modules does to the process. With lastbit[embedded] it is a user's own."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.servers import ROOT

PROGRAM = """
import asyncio, decimal, gc, importlib, json, locale, logging, multiprocessing, os, pkgutil, signal, socket, sys
import threading, warnings
import prometheus_client, structlog

registry = prometheus_client.CollectorRegistry()
prometheus_client.Counter("orders", "A user's own", registry=registry)


def state():
    root = logging.getLogger()
    return {
        "logging": (root.level, root.handlers, root.filters, root.manager.disable, logging.getLoggerClass()),
        "structlog": (structlog.is_configured(), structlog.get_config()),
        "signals": [(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": (warnings.filters, warnings.showwarning),
        "event loops": asyncio.get_event_loop_policy(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.meta_path, sys.path_hooks),
        "path": sys.path,
        "environment": sorted(os.environ.items()),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.callbacks),
        "interpreter": (sys.getswitchinterval(), sys.getrecursionlimit(), sys.get_int_max_str_digits()),
        "threads": threading.enumerate(),
        "defaults": (socket.getdefaulttimeout(), multiprocessing.get_start_method(allow_none=True)),
        "numbers and texts": (decimal.getcontext(), locale.setlocale(locale.LC_ALL)),
        "a user's metrics": prometheus_client.generate_latest(registry),
        "others in the registry": sorted(
            metric.name for metric in prometheus_client.REGISTRY.collect() if not metric.name.startswith("lastbit_")
        ),
    }


before = {name: repr(value) for name, value in state().items()}
for package in ("core", "api", "senders"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
from jobs import dispatcher, janitor
print(json.dumps([name for name, value in state().items() if repr(value) != before[name]]))
"""


def test_importing_the_service_changes_nothing_else_in_the_process() -> None:
    """No logs, signals, warnings, hooks, event loops, settings of the interpreter or metrics of others."""
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == []
