"""Responses to failed calls of the ack routes."""

from __future__ import annotations

import structlog

from api import problems
from api.metrics import ACK_REQUESTS, REFUSED
from api.problems import Problem
from api.server.middleware import HEADER, request_id
from core import errors
from core.batches.lifecycle import Verb

log = structlog.get_logger(__name__)


def refusal(verb: Verb, error: Exception, own_id: bytes | None) -> Problem:
    """The response to a failed call. Its request id is the client's `own_id` if that is valid. The failure is counted,
    and logged if the client did not cause it. Refusals under overload aren't logged here: there may be thousands a
    second, and the combiner logs their start once."""
    name = request_id(own_id)
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, errors.CoreError):
        problem = problems.from_core(error)
    else:
        problem = problems.internal()
    if problem.status == 500:
        trace = None if isinstance(error, errors.CoreError) else error
        log.error("ack_failed", request_id=name, verb=verb.value, error=str(error), exc_info=trace)
    elif isinstance(error, errors.Overloaded):
        REFUSED.labels("acks").inc()
    elif problem.status > 500:
        log.warning("ack_unavailable", request_id=name, verb=verb.value, error=problem.detail)
    ACK_REQUESTS.labels(verb.value, str(problem.status)).inc()
    problem.headers[HEADER] = name
    return problem
