"""Where a message came from first, through all the services that republished it.

A queue numbers messages anew each time that they are published, so what a republisher publishes twice has two offsets.
The *source chain* is what stays the same: the topics, partitions and offsets that a message passed through, and which
of the products of each it is. Its root says which message of the first log it goes back to, and so whether a tally has
counted it.

The order of all that was made of one root message is that of its children, stage by stage. A tally's guard has one
number for it: three stages that make several messages of one, 131,072 of them each. Stages that pass messages on one by
one leave `child` out, and take no place in that number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self

from lastbit.errors import InvalidArgument
from lastbit.ids import INTEGER_LIMIT

STAGES: Final = 3
"""How many stages of a chain can make several messages of one."""
BITS: Final = 17
MOST_CHILDREN: Final = 1 << BITS
"""Messages that one stage makes of one, at most."""


class Source(NamedTuple):
    """What a tally's guard looks at. `offset` and `child` are the position, the others name the sub-counter."""

    topic: str
    partition: int
    offset: int
    child: int = 0
    generation: int = 0


class Hop(NamedTuple):
    """A message that was read at this place, and which of its products the chain goes on with; None where it has but
    one. `generation` tells topics apart that were made anew under their name."""

    topic: str
    partition: int
    offset: int
    child: int | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SourceChain:
    """The hops of a message, the root first; without any it is a message that nobody has read yet.

    A service that reads a message takes its chain from its header, and adds where it has read it:

        chain = SourceChain.decode(message.headers.get(SourceChain.HEADER))
        read = chain.hop(message.topic, message.partition, message.offset)       # to apply it to a tally
        made = chain.hop(message.topic, message.partition, message.offset, n)    # for the header of its n-th product
    """

    hops: tuple[Hop, ...] = ()

    HEADER: ClassVar[str] = "lastbit-source"
    """The name under which a message carries its chain."""

    def hop(
        self, topic: str, partition: int, offset: int, child: int | None = None, *, generation: int = 0
    ) -> SourceChain:
        """The chain with one hop more. Raises `InvalidArgument`."""
        if not isinstance(topic, str) or not topic:
            raise InvalidArgument(f"a topic is a text, not {topic!r}")
        for name, number in (("partition", partition), ("offset", offset), ("generation", generation)):
            if not _is_count(number, INTEGER_LIMIT):
                raise InvalidArgument(f"{name} is a whole number from 0 below 2^53, not {number!r}")
        if child is not None:
            if not _is_count(child, MOST_CHILDREN):
                raise InvalidArgument(f"a child is one of at most {MOST_CHILDREN:,}, not {child!r}")
            if sum(each.child is not None for each in self.hops) == STAGES:
                raise InvalidArgument(f"at most {STAGES} stages of a chain can make several messages of one")
        return SourceChain((*self.hops, Hop(topic, partition, offset, child, generation)))

    @property
    def root(self) -> Hop:
        """The place in the first log. Raises `InvalidArgument` for a chain without hops."""
        if not self.hops:
            raise InvalidArgument("the chain is empty: add where the message was read, by hop")
        return self.hops[0]

    @property
    def source(self) -> Source:
        """The root, as a tally's guard looks at it. Raises `InvalidArgument` for a chain without hops."""
        root = self.root
        child = 0
        stages = [each.child for each in self.hops if each.child is not None]
        for stage in range(STAGES):
            child = child << BITS | (stages[stage] if stage < len(stages) else 0)
        return Source(root.topic, root.partition, root.offset, child, root.generation)

    def encode(self) -> str:
        """As a header's value: JSON in visible ASCII."""
        hops = []
        for each in self.hops:
            hop: dict[str, Any] = {"topic": each.topic, "partition": each.partition, "offset": each.offset}
            if each.child is not None:
                hop["child"] = each.child
            if each.generation:
                hop["generation"] = each.generation
            hops.append(hop)
        return json.dumps(hops, separators=(",", ":"))

    @classmethod
    def decode(cls, header: str | bytes | None) -> Self:
        """Of a header's value; None, a message without one, is the empty chain. Raises `InvalidArgument`."""
        if header is None:
            return cls()
        try:
            chain = SourceChain()
            for hop in json.loads(header):
                chain = chain.hop(
                    hop["topic"],
                    hop["partition"],
                    hop["offset"],
                    hop.get("child"),
                    generation=hop.get("generation", 0),
                )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise InvalidArgument(f"{header!r} is no source chain: {cause}") from cause
        return cls(chain.hops)


class TallyEntry(NamedTuple):
    """What one message adds to one key of a tally."""

    key: str
    delta: int
    source: Source | SourceChain


def source_of(source: Source | SourceChain) -> Source:
    """Either, as a `Source`. Raises `InvalidArgument`."""
    if isinstance(source, SourceChain):
        return source.source
    if isinstance(source, Source):
        return source
    raise InvalidArgument(f"a source is a Source or a SourceChain, not {source!r}")


def _is_count(number: object, limit: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < limit
