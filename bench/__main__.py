"""`python -m bench [--quick] [question …]`: all questions, or the named ones."""

from __future__ import annotations

import argparse
import importlib

from bench.measure import Scale

QUESTIONS = (
    "acks",
    "verbs",
    "lifecycle",
    "idle",
    "embedded",
    "once",
    "bulk",
    "trillion",
    "extend",
    "status",
    "search",
    "storage",
    "wait",
    "overload",
    "stalls",
    "growth",
    "neighbours",
    "tallies",
    "ordered",
    "processes",
    "webhooks",
    "scale",
    "capacity",
    "durability",
    "postgresql",
    "peers",
    "celery",
    "sqs",
    "integrations",
    "rabbitmq",
    "spark",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run, to check that everything works")
    parser.add_argument("question", nargs="*", choices=[[], *QUESTIONS], default=[], help=", ".join(QUESTIONS))
    options = parser.parse_args()
    scale = Scale.quick() if options.quick else Scale.full()
    for question in options.question or QUESTIONS:
        importlib.import_module(f"bench.{question}").run(scale)


if __name__ == "__main__":
    main()
