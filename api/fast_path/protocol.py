"""uvicorn's protocol with the fast path: each request is given to its verb, or takes the ordinary path."""

from __future__ import annotations

from typing import Any, Final

from api.fast_path import acks, verbs
from api.fast_path.acks import KnownHeads
from api.fast_path.exchange import Exchange, ExchangeProtocol, FastVerb

_ALL: Final[tuple[FastVerb, ...]] = (*acks.VERBS, *verbs.VERBS)
_VERBS: Final = {method.encode(): [verb for verb in _ALL if verb.method == method] for method in ("GET", "POST", "PUT")}
_known_heads: Final = KnownHeads()


class FastProtocol(ExchangeProtocol):
    """See the module."""

    def data_received(self, data: bytes) -> None:
        # The ordinary path waits for clients that don't read their responses.
        if not self.between or not self.at_rest or self.flow.write_paused:
            super().data_received(data)
            return
        end = data.find(b"\r\n\r\n") + 4
        exchange = _known_heads.exchange(self, data, end)
        if exchange is not None:
            self.cycle = exchange  # type: ignore[assignment]  # it has the attributes that uvicorn uses
            exchange.begin(data[end:])
            return
        heads = self.heads
        super().data_received(data)
        cycle: Any = self.cycle
        # `data` may have contained two requests. Then the first may be finished, and `cycle` is the second's.
        if self.heads == heads + 1:
            _known_heads.add(cycle, data, end)

    def open_cycle(self) -> None:
        exchange = self._exchange()
        if exchange is None:
            super().open_cycle()
        else:
            self.cycle = exchange  # type: ignore[assignment]  # as above

    def _exchange(self) -> Exchange | None:
        """The exchange for the current request, whose head is complete; None if it takes the ordinary path."""
        for verb in _VERBS.get(self.parser.get_method(), ()):
            target = verb.pattern.fullmatch(self.url)
            if target is not None:
                head = self.plain_request()
                return None if head is None else verb.exchange(self, target, head)
        return None
