"""`python -m bench [--quick] [question …]`: all questions, or those that are named."""

from __future__ import annotations

import argparse
import importlib

from bench.measure import Scale

QUESTIONS = (
    *("acks", "bulk", "extend", "status", "storage", "wait", "overload", "stalls", "tallies", "ordered", "processes"),
    *("scale", "durability", "peers", "celery", "spark"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, to see that nothing has rotted")
    parser.add_argument("question", nargs="*", choices=[[], *QUESTIONS], default=[], help=", ".join(QUESTIONS))
    options = parser.parse_args()
    scale = Scale.quick() if options.quick else Scale.full()
    for question in options.question or QUESTIONS:
        importlib.import_module(f"bench.{question}").run(scale)


if __name__ == "__main__":
    main()
