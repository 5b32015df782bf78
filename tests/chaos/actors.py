"""`python -m tests.chaos.actors KIND --broker PORT --url URL --database URL --record FOLDER`: run one actor until the
broker stops it."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lastbit import AsyncClient, Client
from tests import mutants
from tests.chaos import consumers, nesting, producers, racing, readers
from tests.chaos.broker import Link
from tests.chaos.command_line import CommandLine
from tests.chaos.consumers import PATIENCE, TIMEOUT
from tests.chaos.embedded import Embedded
from tests.chaos.record import AsyncRecording, Record, Recording, record_urllib


class Actor:
    def __init__(self, url: str, link: Link, record: Record, dice: random.Random) -> None:
        self.url = url
        self.link = link
        self.record = record
        self.dice = dice

    @property
    def client(self) -> Client:
        return Client(self.url, timeout=TIMEOUT, retry=PATIENCE, transport=Recording(self.record))

    @property
    def async_client(self) -> AsyncClient:
        return AsyncClient(self.url, timeout=TIMEOUT, retry=PATIENCE, transport=AsyncRecording(self.record))

    @property
    def lastbit(self) -> CommandLine:
        return CommandLine(self.url, self.record)

    def produce(self, hand: producers.Hand, at_once: int = 1) -> None:
        asyncio.run(producers.produce(hand, self.link, self.dice, at_once))

    def consume(self, way: consumers.Way) -> None:
        consumers.consume(way, self.link)


def _async_consumer(actor: Actor) -> None:
    with asyncio.Runner() as runner:
        actor.consume(consumers.Async(actor.async_client, runner))


def _embedded(actor: Actor) -> None:
    # As `tests.chaos.dispatcher`: it never pays the debts that a service has forgotten.
    pytest.MonkeyPatch().setattr("core.acks.parents.sweep", lambda *_, **__: 0)
    actor.consume(Embedded(actor.record))


def _masks(actor: Actor, way: type[consumers.Masks] = consumers.Masks) -> None:
    record_urllib(actor.record)
    actor.consume(way(actor.url))


KINDS: dict[str, Callable[[Actor], None]] = {
    "producer-sync": lambda actor: actor.produce(producers.SyncHand(actor.client)),
    "producer-async": lambda actor: actor.produce(producers.AsyncHand(actor.async_client), 3),
    "producer-cli": lambda actor: actor.produce(producers.CommandLineHand(actor.lastbit)),
    "consumer-sync": lambda actor: actor.consume(consumers.Sync(actor.client, actor.dice)),
    "consumer-async": _async_consumer,
    "consumer-acker": lambda actor: actor.consume(consumers.Acking(actor.client)),
    "consumer-cli": lambda actor: actor.consume(consumers.CommandLines(actor.lastbit)),
    "consumer-masks": _masks,
    "consumer-spark": lambda actor: actor.consume(consumers.Spark(actor.url, actor.record)),
    "reader": lambda actor: readers.read(actor.client, actor.link, actor.dice),
    "verifier": lambda actor: readers.verify(actor.client, actor.link),
}
GROWING = {
    "growing-producer": lambda actor: actor.produce(producers.AsyncHand(actor.async_client), 3),
    "growing-sync": KINDS["consumer-sync"],
    "growing-async": KINDS["consumer-async"],
    "growing-bulk": lambda actor: actor.consume(consumers.Bulk(actor.client, actor.dice)),
    "growing-masks": lambda actor: _masks(actor, consumers.RepeatingMasks),
}
"""Actors of the lane of growing batches."""
SHARED = {
    "shared-producer": lambda actor: actor.produce(producers.AsyncHand(actor.async_client), 2),
    "shared-sync": KINDS["consumer-sync"],
    "shared-masks": _masks,
    "shared-embedded": _embedded,
    "shared-embedded-2": _embedded,
}
"""Actors of the lane of batches that consumers of the service share with consumers without it. It is a lane of its own,
since a batch that transactions of callers change has no journal."""
LANES = {"usual": KINDS, "growing": GROWING, "shared": SHARED}
RACING, NESTING = "racing", "nesting"
"""The actors of the lanes with these names."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.actors")
    parser.add_argument("kind", choices=[*KINDS, *GROWING, *SHARED, RACING, NESTING])
    parser.add_argument("--broker", type=int, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    lane = next((name for name, kinds in LANES.items() if options.kind in kinds), options.kind)
    link, record = Link(options.broker, lane), Record(options.record, options.kind)
    actor = Actor(options.url, link, record, random.Random())
    if options.kind == RACING:
        racing.race(lambda: actor.client, link, options.database)
    elif options.kind == NESTING:
        client = AsyncClient(options.url, timeout=nesting.TIMEOUT, retry=PATIENCE, transport=AsyncRecording(record))
        asyncio.run(nesting.nest(client, link))
    else:
        LANES[lane][options.kind](actor)


if __name__ == "__main__":
    mutants.from_environment()
    main()
