"""The origin of a message: chains of hops, the position that a tally's guard compares, and headers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lastbit import Hop, InvalidArgument, Source, SourceChain
from lastbit.chains import MOST_CHILDREN, OFFSET_LIMIT, STAGES
from lastbit.ids import INTEGER_LIMIT


def test_the_source_is_the_root_message() -> None:
    """Publishing the message again does not change its source."""
    chain = SourceChain().hop("fastened", 3, 17, generation=2)
    assert chain.source == Source("fastened", 3, 17, 0, 2)
    longer = SourceChain.decode(chain.encode()).hop("by-robot", 0, 99)
    assert longer.source == chain.source
    assert longer.root == Hop("fastened", 3, 17, None, 2)
    assert [hop.topic for hop in longer.hops] == ["fastened", "by-robot"]


def test_messages_are_ordered_as_their_stages_made_them() -> None:
    """The order follows the child number of the first stage, then of the second, and so on; all numbers are below
    2^53."""
    dice = random.Random(1)
    children = [0, 1, 2, 9, 10, MOST_CHILDREN - 1]
    paths = [tuple(dice.choice(children) for _ in range(STAGES)) for _ in range(300)]
    paths.append((MOST_CHILDREN - 1,) * STAGES)

    def child(path: tuple[int, ...]) -> int:
        chain = SourceChain()
        for stage, number in enumerate(path):
            chain = chain.hop(f"stage-{stage}", 0, dice.randrange(1000), number)
        return chain.source.child

    assert sorted(paths) == sorted(paths, key=child)
    assert len({child(path) for path in paths}) == len(set(paths))
    assert max(map(child, paths)) < INTEGER_LIMIT


def test_a_stage_that_passes_messages_on_uses_no_level() -> None:
    """Inserting such a stage doesn't make a message count again."""
    straight = SourceChain().hop("t", 0, 5, 7).hop("u", 0, 0, 2)
    detour = SourceChain().hop("t", 0, 5).hop("v", 1, 3, 7).hop("u", 0, 0).hop("w", 4, 4, 2)
    assert detour.source == straight.source
    assert SourceChain().hop("t", 0, 5, 0).source == SourceChain().hop("t", 0, 5).source


def test_a_chain_travels_in_a_header() -> None:
    """As visible ASCII, from text and from bytes; a message without the header is at its root."""
    chain = SourceChain().hop("Schräubchen \U0001f529", 3, 17, 2, generation=1).hop("u", 0, 0).hop("v", 0, 4, 0)
    header = chain.encode()
    assert all(" " <= character <= "~" for character in header)
    assert SourceChain.decode(header) == SourceChain.decode(header.encode()) == chain
    assert SourceChain.decode(None) == SourceChain.decode("[]") == SourceChain()
    with pytest.raises(InvalidArgument, match="empty"):
        _ = SourceChain().source


@pytest.mark.parametrize(
    "header",
    [
        *(
            "",
            "x",
            "{}",
            "{}x",
            '""',
            "7",
            "[7]",
            '["a"]',
            "[{}]",
            '[{"topic":"t","partition":0}]',
            b"\xff",
            "[" * 100_000,
        ),
        '[{"topic":"t","partition":0,"offset":"5"}]',
        '[{"topic":"t","partition":-1,"offset":5}]',
        '[{"topic":"","partition":0,"offset":5}]',
        '[{"topic":"t","partition":0,"offset":5.0}]',
        '[{"topic":"t","partition":true,"offset":5}]',
        f'[{{"topic":"t","partition":0,"offset":{OFFSET_LIMIT}}}]',
    ],
)
def test_a_header_that_is_not_a_chain_is_refused(header: Any) -> None:
    """The client does not guess; its caller decides how to handle the message."""
    with pytest.raises(InvalidArgument, match="is not a source chain"):
        SourceChain.decode(header)


@pytest.mark.parametrize(
    "hop",
    [
        *(("", 0, 0), (None, 0, 0), ("t", -1, 0), ("t", 0, OFFSET_LIMIT), ("t", 0, True), ("t", "0", 0)),
        *(("t", 0, 0, -1), ("t", 0, 0, MOST_CHILDREN), ("t", 0, 0, "1")),
    ],
)
def test_an_invalid_hop_is_refused(hop: Any) -> None:
    """A stage that splits messages is refused beyond the limit of stages."""
    with pytest.raises(InvalidArgument):
        SourceChain().hop(*hop)
    chain = SourceChain()
    for stage in range(STAGES):
        chain = chain.hop("t", 0, stage, 1)
    assert chain.hop("t", 0, 9).source == chain.source
    with pytest.raises(InvalidArgument, match="at most 3 stages"):
        chain.hop("t", 0, 9, 0)
