"""Requests that are carried out in a transaction of the caller, for `in_process`: acks, failures, skips, opens, extends
and seals. They are parsed and answered as their routes do, so that callers get the same results and errors."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pydantic import ValidationError

from api import problems
from api.access.tokens import EVERYBODY
from api.acks.bodies import encode, parse
from api.acks.refusals import refusal
from api.acks.routes import PATHS
from api.fast_path.verbs import KEY, problem_of
from api.in_process import JSON, Request, Response, refused
from api.problems import Place, Problem
from api.routes import batches, fields, models
from api.routes.reply import Reply
from api.server import bodies
from core import errors
from core.acks.call import AckResult, Call
from core.batches.lifecycle import Verb
from core.enlisted.acks import Resolved
from core.enlisted.transaction import Transaction
from core.service import Service
from core.service.batches import opening_of
from lastbit.ids import ItemId

_BATCHES: Final = "/v1/batches"
_OF_BATCH: Final = re.compile(r"/v1/batches/(0|[1-9][0-9]{0,15})/(items|seal)")


class Enlisting:
    """Carries requests out in one transaction. `settled` then tells of the batches that are complete."""

    def __init__(self, service: Service, tx: Transaction) -> None:
        self._service = service
        self._tx = tx
        self._resolved: list[tuple[Call, Resolved]] = []

    def request(self, request: Request) -> Response:
        """`GET` with an item as its target tells whether the item was resolved before this transaction, by a plain
        read: False may be outdated. Raises the driver's errors; `errors.Unavailable`; `errors.Misconfigured` for a
        transaction that is not fit for it."""
        verb = PATHS.get(request.target) if request.method == "POST" else None
        try:
            if request.method == "GET":
                is_resolved = self._service.enlisted.is_resolved(self._tx, ItemId.parse(request.target))
                return Response(200, JSON, json.dumps(is_resolved).encode())
            if verb is not None:
                return Response(200, JSON, self._resolve(verb, request))
            return self._write(request)
        except errors.CoreError as error:
            is_callers = isinstance(error, errors.Misconfigured)  # no client of a service could cause it
            if is_callers or (errors.is_outage(error) and not isinstance(error, errors.Overloaded)):
                raise
            return refused(problem_of(error) if verb is None else refusal(verb, error, None))
        except Problem as problem:
            return refused(problem)

    def settled(self) -> bytes:
        """After the commit: the answer to all acks of the transaction, with the completions that they know now."""
        answer = AckResult()
        for call, resolved in self._resolved:
            part = self._service.enlisted.settled(call, resolved)
            answer.applied += part.applied
            answer.repeated += part.repeated
            answer.rejected += part.rejected
            answer.completed |= part.completed
        return encode(answer)

    def _resolve(self, verb: Verb, request: Request) -> bytes:
        key = request.headers.get("idempotency-key")
        call, check = parse(
            verb, None if key is None else key.encode(), request.content or b"{}", EVERYBODY, self._service
        )
        if check is not None:
            check()
        resolved = self._service.enlisted.resolve(self._tx, call)
        self._resolved.append((call, resolved))
        return encode(resolved.answer)

    def _write(self, request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        if key is not None and not KEY.fullmatch(key.encode()):
            raise problems.invalid([Place("header Idempotency-Key", "expected 1 to 255 visible ASCII characters")])
        of_batch = _OF_BATCH.fullmatch(request.target)
        service, tx = self._service.enlisted, self._tx
        if request.target == _BATCHES:
            opening = _parsed(models.OpenBody, request).opening()
            self._service.batches.check_callback(opening)
            return _answer(batches.opened(service.open(tx, opening_of(opening, key))))
        assert of_batch is not None, f"{request.target} is no request for a transaction"
        batch, noun = int(of_batch[1]), of_batch[2]
        if noun == "items":
            operation = _parsed(models.ExtendBody, request).operation(batch, key)
            return _answer(batches.extended(service.extend(tx, operation)))
        service.seal(tx, batch)
        return Response(204, {}, b"")


def _parsed(model: type[fields.Body], request: Request) -> Any:
    try:
        return model.model_validate(bodies.parsed(request.content or b"{}"), from_attributes=True)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise problems.from_faults(faults, model) from None


def _answer(reply: Reply) -> Response:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    return Response(reply.status, {**JSON, **headers}, reply.content)
