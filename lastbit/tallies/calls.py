"""Requests for tallies, as flows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lastbit import _arguments, errors
from lastbit._calls import ask, fence_json, pages
from lastbit._protocol import Flow, Service, in_path, resource, single
from lastbit.chains import Source, SourceChain, TallyRange, source_of
from lastbit.ids import INTEGER_LIMIT
from lastbit.models import Fence, Json
from lastbit.tallies.models import RangeResult, TallyApplied, TallyTotal, TallyValue

Entry = tuple[str, int, Source | SourceChain]
"""Key, delta and source. `TallyEntry` is one."""


def entry_json(entry: Entry) -> Json:
    """An entry as JSON. Raises `InvalidArgument`."""
    try:
        key, delta, source = entry
    except (TypeError, ValueError):
        raise _arguments.refusal("an entry", "a key, a delta and a source", entry) from None
    topic, partition, offset, child, generation = source_of(source)
    if isinstance(offset, int) and offset >= INTEGER_LIMIT:
        raise errors.InvalidArgument(f"offsets of entries are below 2^53, not {offset}: larger ones need ranges")
    place: dict[str, Any] = {"topic": topic, "partition": partition, "offset": offset}
    if child:
        place["child"] = child
    if generation:
        place["generation"] = generation
    return {"key": in_path("a key", key), "delta": delta_of(delta), "source": place}


def delta_of(delta: object) -> int:
    """Raises `InvalidArgument`."""
    if not isinstance(delta, int) or isinstance(delta, bool):
        raise errors.InvalidArgument(f"a delta is a whole number, not {delta!r}")
    return delta


def apply(service: Service, tally: str, entries: Iterable[Json], fence: Fence | None = None) -> Flow[TallyApplied]:
    """Apply `entries`, each made by `entry_json`."""
    body: dict[str, Any] = {"entries": list(entries)}
    if fence is not None:
        body["fence"] = fence_json(fence)
    return ask(service, "POST", _path(tally, "apply"), TallyApplied.from_json, body=body)


def apply_ranges(
    service: Service, tally: str, ranges: Iterable[TallyRange], fence: Fence | None = None
) -> Flow[list[RangeResult]]:
    """One result for each range. Raises `InvalidArgument`."""
    body: dict[str, Any] = {"ranges": list(map(_range_json, ranges))}
    if fence is not None:
        body["fence"] = fence_json(fence)
    return ask(service, "POST", _path(tally, "ranges"), _results, body=body)


def _range_json(span: TallyRange) -> Json:
    if not isinstance(span, TallyRange):
        raise _arguments.refusal("a range", "a TallyRange", span)
    if not isinstance(span.totals, Mapping):
        raise _arguments.refusal("totals", "a mapping of keys to whole numbers", span.totals)
    for name, position in (("after", span.after), ("upto", span.upto)):
        if not (isinstance(position, str) or (position is None and name == "after")):
            raise _arguments.refusal(name, "a text", position)
    totals = {in_path("a key", key): delta_of(delta) for key, delta in span.totals.items()}
    return {**span._asdict(), "totals": totals}


def _results(data: Json) -> list[RangeResult]:
    return list(map(RangeResult.from_json, data["results"]))


def value(service: Service, tally: str, key: str) -> Flow[TallyValue]:
    if not isinstance(key, str) or not key:
        raise errors.InvalidArgument(f"a key is a text, not {key!r}")
    return ask(service, "GET", _path(tally, key), TallyValue.from_json)


def totals(service: Service, tally: str, prefix: str, page_size: int) -> Flow[None]:
    """Emits `TallyTotal`s."""
    params = [("prefix", prefix)] if prefix else []
    return pages(service, _path(tally), "totals", TallyTotal.from_json, params, page_size)


def delete(service: Service, tally: str) -> Flow[None]:
    yield from service.call("DELETE", _path(tally))


def _path(tally: str, *rest: str) -> str:
    return resource("tallies", single("a tally's name", tally), *rest)
