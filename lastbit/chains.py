"""The original source of a message, across all services that republished it.

A queue assigns a new offset on each publish, so a message that is republished twice has two offsets. The *source chain*
doesn't change: it has the topics, partitions and offsets that a message passed through, and its index among the
messages derived at each hop. Its root identifies the message in the first log, so a tally can detect whether it has
counted the message.

All messages derived from one root message are ordered by their children, stage by stage. A tally's guard stores this
order in one number, which has room for three stages that derive several messages from one, up to 131,072 each. Stages
that derive only one message omit `child` and need no room in that number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self

from lastbit.errors import InvalidArgument
from lastbit.ids import INTEGER_LIMIT

STAGES: Final = 3
"""Maximum stages of a chain that derive several messages from one."""
BITS: Final = 17
OFFSET_LIMIT: Final = 10**100
"""Offsets are below it. Those of Kinesis have 56 digits."""
MOST_CHILDREN: Final = 1 << BITS
"""Maximum messages that one stage derives from one."""


class Source(NamedTuple):
    """The source of an entry, as a tally's guard compares it. `offset` and `child` are the position; `topic`,
    `partition` and `generation` identify the sub-counter."""

    topic: str
    partition: int
    offset: int
    child: int = 0
    generation: int = 0


class Hop(NamedTuple):
    """One hop of a chain: where a message was read. `child`: the index of the derived message with which the chain
    continues; None if there is only one. `generation` distinguishes topics that were recreated under the same name."""

    topic: str
    partition: int
    offset: int
    child: int | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SourceChain:
    """The hops of a message, the root first. A chain without hops belongs to a message that was not read yet.

    A service that reads a message decodes the chain from the header and adds a hop for its own read:

        chain = SourceChain.decode(message.headers.get(SourceChain.HEADER))
        read = chain.hop(message.topic, message.partition, message.offset)       # to apply it to a tally
        made = chain.hop(message.topic, message.partition, message.offset, n)    # for the header of its n-th product
    """

    hops: tuple[Hop, ...] = ()

    HEADER: ClassVar[str] = "lastbit-source"
    """The name of the message header that holds the chain."""

    def hop(
        self, topic: str, partition: int, offset: int, child: int | None = None, *, generation: int = 0
    ) -> SourceChain:
        """The chain with one more hop. Raises `InvalidArgument`, also for a fourth hop with a `child`."""
        if not isinstance(topic, str) or not topic:
            raise InvalidArgument(f"a topic is a text, not {topic!r}")
        if not _is_count(offset, OFFSET_LIMIT):
            raise InvalidArgument(f"an offset is a whole number from 0 below 10^100, not {offset!r:.200}")
        for name, number in (("partition", partition), ("generation", generation)):
            if not _is_count(number, INTEGER_LIMIT):
                raise InvalidArgument(f"{name} is a whole number from 0 below 2^53, not {number!r}")
        if child is not None:
            if not _is_count(child, MOST_CHILDREN):
                raise InvalidArgument(f"a child is one of at most {MOST_CHILDREN:,}, not {child!r}")
            if sum(hop.child is not None for hop in self.hops) == STAGES:
                raise InvalidArgument(f"at most {STAGES} stages of a chain can derive several messages from one")
        return SourceChain((*self.hops, Hop(topic, partition, offset, child, generation)))

    @property
    def root(self) -> Hop:
        """The first hop. Raises `InvalidArgument` for a chain without hops."""
        if not self.hops:
            raise InvalidArgument("the chain is empty: call hop with the place where the message was read")
        return self.hops[0]

    @property
    def source(self) -> Source:
        """The root as a `Source`, with all children combined into one number. Raises `InvalidArgument` for a chain
        without hops."""
        root = self.root
        child = 0
        stages = [hop.child for hop in self.hops if hop.child is not None]
        for stage in range(STAGES):
            child = child << BITS | (stages[stage] if stage < len(stages) else 0)
        return Source(root.topic, root.partition, root.offset, child, root.generation)

    def encode(self) -> str:
        """Encode as a header value: JSON in visible ASCII."""
        hops = []
        for hop in self.hops:
            fields: dict[str, Any] = {"topic": hop.topic, "partition": hop.partition, "offset": hop.offset}
            if hop.child is not None:
                fields["child"] = hop.child
            if hop.generation:
                fields["generation"] = hop.generation
            hops.append(fields)
        return json.dumps(hops, separators=(",", ":"))

    @classmethod
    def decode(cls, header: str | bytes | None) -> Self:
        """Decode a header value. None (no header) gives the empty chain. Raises `InvalidArgument`."""
        if header is None:
            return cls()
        try:
            chain, hops = SourceChain(), json.loads(header)
            if not isinstance(hops, list):
                raise TypeError("it is no list of hops")
            for hop in hops:
                chain = chain.hop(
                    hop["topic"],
                    hop["partition"],
                    hop["offset"],
                    hop.get("child"),
                    generation=hop.get("generation", 0),
                )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise InvalidArgument(f"{header!r} is not a source chain: {cause}") from cause
        return cls(chain.hops)


class TallyEntry(NamedTuple):
    """The amount (`delta`) that one message adds to one key of a tally."""

    key: str
    delta: int
    source: Source | SourceChain


class TallyRange(NamedTuple):
    """What the messages of a source after the position `after`, up to and including `upto`, add to each key of a tally.
    Positions are texts of up to 128 bytes; `after` is None if nothing of the source was counted."""

    topic: str
    partition: int
    after: str | None
    upto: str
    totals: Mapping[str, int]
    generation: int = 0


def range_source_of(source: Source | SourceChain) -> Source:
    """The source and the position by which ranges count a message. Behind republishers, the source is the root with the
    path from there: the messages of one root partition may come over several partitions, and only those that take the
    same path are in order. Raises `InvalidArgument`."""
    root = source_of(source)
    if isinstance(source, SourceChain):
        path = "".join(f">{hop.topic}/{hop.partition}" for hop in source.hops[1:])
        return root._replace(topic=root.topic + path)
    return root


def source_of(source: Source | SourceChain) -> Source:
    """Convert either type to a `Source`. Raises `InvalidArgument`."""
    if isinstance(source, SourceChain):
        return source.source
    if isinstance(source, Source):
        return source
    raise InvalidArgument(f"a source is a Source or a SourceChain, not {source!r}")


def _is_count(number: object, limit: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < limit
