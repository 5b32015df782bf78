"""The routes of process managers: workers store the effect of an event, and people inspect processes and instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, Self

import structlog
from fastapi import Path, Query, Request, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from api import expectations, patterns, problems
from api.access.rules import ANY, needs
from api.limits import sizes
from api.limits.sizes import DEPTH
from api.problems import BODY, documented
from api.routes import cursors, free_json
from api.routes.commands import Command, Limit, command_json
from api.routes.consumer_groups import Epoch
from api.routes.consumer_groups import Name as WorkerName
from api.routes.events import Name
from api.routes.fields import Body
from api.routes.free_json import DATA, MAX_STATE, Data, State
from api.routes.reply import Reply
from api.routes.route import JsonRoute, PrefixedRouter
from api.routes.writes import Writes
from core import errors
from core.commits.operation import Done
from core.consumer_groups import groups
from core.processes import definitions, instances, outbox, timers
from core.processes.handling import HandleMany, handle_many_of, handle_of
from core.service import Service
from core.storage import tables
from lastbit.ids import INTEGER_LIMIT
from lastbit.names import NO_NAMES
from lastbit.tokens import Role

log = structlog.get_logger(__name__)

router = PrefixedRouter(prefix="/v1/processes", route_class=JsonRoute, tags=["processes"])

MAX_COMMANDS: Final = 100
MAX_HANDLINGS: Final = 100
"""Handled events in one call: the response has their instances' states."""
LONGEST_TIMER: Final = 10 * 365 * 86_400


def _unicode(value: str) -> str:
    """Refuse half a surrogate pair, which no database can store."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("expected Unicode text") from None
    return value


def _in_a_path(value: str) -> str:
    if value in NO_NAMES:
        raise ValueError("expected a name other than . and ..")
    if any(character < " " or character == "\x7f" for character in value):
        raise ValueError("expected a name without control characters")
    return _unicode(value)


NAME: Final = rf"[A-Za-z0-9][A-Za-z0-9._:-]{{0,{tables.PROCESS_NAME - 1}}}"
_IN_WORDS: Final = "a letter or digit, then up to 199 letters, digits, `.`, `_`, `:` or `-`"

ProcessName = Annotated[
    str,
    Path(
        alias="process",
        pattern=expectations.worded(rf"^{NAME}$", _IN_WORDS),
        description=_IN_WORDS,
    ),
]
InstanceName = Annotated[
    str,
    Path(
        alias="instance",
        min_length=1,
        max_length=255,
        json_schema_extra={"pattern": patterns.INSTANCE},
    ),
    AfterValidator(_in_a_path),
]
CommandType = Annotated[str, StringConstraints(pattern=expectations.visible_ascii(tables.PROCESS_NAME))]
Text = Annotated[str, StringConstraints(min_length=1, max_length=255), AfterValidator(_unicode)]
Cursor = Annotated[str | None, Query(description="`next` of the previous page")]
StatusName = Literal["running", "finished", "parked"]


class ProcessBody(Body):
    partitions: int | None = Field(
        None,
        ge=1,
        le=groups.MOST_PARTITIONS,
        description=f"can't be changed later; default {definitions.PARTITIONS}",
    )
    ttl: float | None = Field(
        None,
        ge=0.1,
        le=3600,
        allow_inf_nan=False,
        description="seconds without a sync after which a worker loses its partitions; default 10",
    )
    release: float | None = Field(
        None,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds that a worker has to drain a partition that it must release; default 30",
    )
    after: int | None = Field(
        None,
        ge=0,
        lt=INTEGER_LIMIT,
        description="a new process begins after this position; null: with the first event that is kept",
    )


class HandledEvent(Body):
    id: Name
    position: int = Field(ge=1, lt=INTEGER_LIMIT)


class ProcessFence(Body):
    worker: WorkerName
    epoch: Epoch = Field(description="the epoch of the instance's partition, from the worker's sync")


class NewCommand(Body):
    type: CommandType = Field(description="the type of its event is `command.` and this type")
    step: Text | None = Field(
        None,
        description="an instance issues each step once; null: the same as the type, or with `once` false one that no "
        "other command has",
    )
    # Workers of earlier releases don't send it, and expect a repeat.
    once: bool = Field(
        True,
        description="if another event, or another command of this one, has issued this step: true: the command is a "
        "repeat; false: the call is refused",
    )
    data: Data = Field(None, description=DATA)


class NewTimer(Body):
    timer: Text = Field(description="its name; replaces a timer of the same name")
    after: float | None = Field(
        None, ge=0, le=LONGEST_TIMER, allow_inf_nan=False, description="seconds from now; null: cancel it"
    )
    data: Data = Field(None, description=f"{DATA}; it is the data of the timer's event")


class HandleBody(Body):
    LIMIT = sizes.BODY

    event: HandledEvent
    fence: ProcessFence
    version: int = Field(
        ge=0, lt=INTEGER_LIMIT, description="the version of the state that this was computed from; 0: there was none"
    )
    state: State = Field(
        None, description=f"the new state: any JSON, at most {MAX_STATE:,} bytes and {DEPTH} levels of nesting"
    )
    commands: list[NewCommand] = Field(default_factory=list, max_length=MAX_COMMANDS)
    timers: list[NewTimer] = Field(default_factory=list, max_length=MAX_COMMANDS)
    finish: bool = Field(False, description="end the instance: later events change nothing")
    error: Annotated[str, StringConstraints(min_length=1, max_length=8192), AfterValidator(_unicode)] | None = Field(
        None, description="the handler failed with this error: park the event, and ignore the other fields"
    )
    strict: bool = Field(
        False,
        description="if an earlier event of the instance is parked: park this one too, without an error; it is handled "
        "again once the earlier one is over",
    )


class HandlingEntry(HandleBody):
    instance: Annotated[
        str,
        Field(min_length=1, max_length=255, json_schema_extra={"pattern": patterns.INSTANCE}),
        AfterValidator(_in_a_path),
    ]


def _entry(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """The entry, or the problem of one that its model refuses, as that doesn't affect the others."""
    try:
        return validate(value)
    except ValidationError as error:
        return problems.from_faults(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()], HandlingEntry
        )


class HandlingsBody(Body):
    LIMIT = sizes.BODY

    handlings: list[Annotated[HandlingEntry, WrapValidator(_entry)]] = Field(min_length=1, max_length=MAX_HANDLINGS)


class UnnamedBody(Body):
    after: int = Field(ge=0, lt=INTEGER_LIMIT, description="the position up to which they were counted before")
    upto: int = Field(ge=1, lt=INTEGER_LIMIT, description="the position of the last of them")
    count: int = Field(ge=1, lt=INTEGER_LIMIT, description="the number of them above `after`, up to `upto`")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.count > self.upto - self.after:
            raise ValueError("expected at most one event for each position above `after`, up to `upto`")
        return self


class RetryBody(Body):
    event: Name | None = Field(None, description="the event's id; null: all parked events, at most 1,000")


class Process(BaseModel):
    name: str
    group: str = Field(description="the consumer group of its workers")
    partitions: int
    after: int = Field(description="workers begin after this position in a partition without a committed position")
    created_at: datetime
    unnamed: int = Field(description="the number of events that were skipped because they named no instance")
    unnamed_upto: int = Field(description="the position up to which these were counted")


class ProcessSummary(Process):
    running: int = Field(description="the number of running instances")
    finished: int
    parked: int = Field(description="the number of events whose handler failed")
    timers: int
    floor: int = Field(description="all events up to this position were handled")


class Processes(BaseModel):
    processes: list[ProcessSummary]


class ProcessInstance(BaseModel):
    process: str
    instance: str
    status: Literal["running", "finished"]
    version: int = Field(description="increases with every handled event")
    state: Any
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    parked: int = Field(description="the number of events whose handler failed")


class InstancePage(BaseModel):
    instances: list[ProcessInstance]
    next: str | None


class InboxEntry(BaseModel):
    event: str = Field(description="its id")
    position: int
    status: Literal["handled", "parked", "retrying", "late"] = Field(
        description="parked: its handler failed; late: it arrived after the instance's end"
    )
    error: str | None
    at: datetime


class ProcessTimer(BaseModel):
    timer: str
    due_at: datetime
    data: Any


class InstanceDetails(ProcessInstance):
    history: list[InboxEntry] = Field(description="its newest 200 events, newest first")
    timers: list[ProcessTimer]
    commands: list[Command] = Field(description="its newest 200 commands, newest first")


class IssuedCommand(BaseModel):
    id: str
    step: str
    position: int
    repeated: bool = Field(description="an earlier call issued it, at this position")


class HandledAnswer(BaseModel):
    status: Literal["handled", "parked", "late", "retrying"] = Field(description="the event's status")
    repeated: bool = Field(description="the event had this status before, and this call changed nothing")
    instance: ProcessInstance | None = Field(description="the instance as it is now")
    commands: list[IssuedCommand]


class HandlingResult(BaseModel):
    handled: HandledAnswer | None = Field(description="null: the entry was refused, and changed nothing")
    problem: Annotated[
        dict[str, Any] | None,
        WithJsonSchema({"oneOf": [{"$ref": "#/components/schemas/Problem"}, {"type": "null"}]}),
    ] = Field(description="why the entry was refused")


class HandlingResults(BaseModel):
    results: list[HandlingResult] = Field(description="one for each entry, in order")


class Retried(BaseModel):
    retrying: int = Field(description="the number of events that will be handled again")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def _definition(definition: definitions.Definition) -> dict[str, Any]:
    return {name: getattr(definition, name) for name in Process.model_fields}


def _instance(instance: instances.Instance) -> dict[str, Any]:
    document = {name: getattr(instance, name) for name in ProcessInstance.model_fields}
    return {**document, "state": free_json.stored(instance.state)}


@router.put(
    "/{process}",
    response_model=Process,
    responses={
        201: {"model": Process, "description": "created"},
        **documented("partitions_fixed", "consumer_group_in_use", "position_trimmed", *BODY),
    },
)
@needs(Role.CONSUME)
def put_process(process: ProcessName, body: ProcessBody, request: Request, response: Response) -> dict[str, Any]:
    """Define a process with the consumer group of its workers, or change the group's `ttl` and `release`. 201 if the
    process is new, else 200."""
    definition, new = _service(request).processes.define(
        process,
        partitions=body.partitions,
        ttl=_seconds(body.ttl),
        release=_seconds(body.release),
        after=body.after,
    )
    response.status_code = 201 if new else 200
    return _definition(definition)


@router.get("", response_model=Processes, responses=documented("invalid_request"))
@needs(*ANY)
def list_processes(request: Request) -> dict[str, Any]:
    """The processes, by name, with counts of their instances, parked events and timers."""
    summaries = _service(request).processes.summaries()
    counts = ("running", "finished", "parked", "timers", "floor")
    return {
        "processes": [
            {**_definition(summary.definition), **{name: getattr(summary, name) for name in counts}}
            for summary in summaries
        ]
    }


@router.get("/{process}", response_model=InstancePage, responses=documented("process_not_found", "invalid_request"))
@needs(*ANY)
def list_instances(
    process: ProcessName,
    request: Request,
    status: Annotated[StatusName | None, Query(description="parked: instances with parked events")] = None,
    limit: Limit = 100,
    cursor: cursors.Cursor = None,
) -> Response:
    """The instances of a process, by name."""
    subject = f"instances:{process}"
    instance_status = None if status is None or status == "parked" else instances.Status(status)
    instances_, is_cut = _service(request).processes.page(
        process, instance_status, cursors.decode_name(subject, cursor), limit, parked=status == "parked"
    )
    following = cursors.encode(subject, instances_[-1].instance) if is_cut else None
    return free_json.response({"instances": [_instance(instance) for instance in instances_], "next": following})


@router.delete(
    "/{process}", status_code=204, responses=documented("process_not_found", "consumer_group_in_use", "invalid_request")
)
@needs(Role.ADMIN)
def delete_process(process: ProcessName, request: Request) -> Response:
    """Delete a process with its instances. Its commands can be read as long as their events are kept. Refused while its
    consumer group has workers."""
    _service(request).processes.delete(process)
    return Response(status_code=204)


@router.post(
    "/{process}/handle",
    response_model=HandlingResults,
    responses=documented(*BODY),
)
@needs(Role.CONSUME)
async def handle_events(process: ProcessName, body: HandlingsBody, request: Request) -> Response:
    """Store the effects of up to 100 events, on one instance or on several, each once. Entries of one instance are
    applied in their order. A refused entry has its problem in its result, and the others are applied. Other calls may
    take place in between. 503 `unavailable`: no entry has a result; send the call again. After a 200, send again those
    whose result has this code."""
    writes: Writes = request.app.state.writes
    operations = many_of(process, body)
    return handled_many(request.url.path, body, operations, await writes.run_all(operations)).response()


@router.post(
    "/{process}/unnamed",
    response_model=Process,
    responses=documented("process_not_found", *BODY),
)
@needs(Role.CONSUME)
def count_unnamed_events(process: ProcessName, body: UnnamedBody, request: Request) -> dict[str, Any]:
    """Count events that a worker has skipped because they named no instance. Nothing is counted if `unnamed_upto` of
    the process is not `after`, so no event is counted twice; the response has the process as it is then."""
    return _definition(_service(request).processes.count_unnamed(process, body.after, body.upto, body.count))


def many_of(process: str, body: HandlingsBody) -> list[HandleMany]:
    """The operations for the valid entries."""
    entries: list[HandlingEntry | problems.Problem] = list(body.handlings)
    return handle_many_of(
        [_handling(process, entry.instance, entry) for entry in entries if isinstance(entry, HandlingEntry)]
    )


def handled_many(path: str, body: HandlingsBody, operations: Sequence[HandleMany], results: Sequence[Done]) -> Reply:
    """The response with one result for each entry: an operation that failed is the result of all of its entries. Raises
    its error if all operations have failed: then there are no results."""
    if results and all(result.error is not None for result in results):
        raise results[0].error  # type: ignore[misc]  # not None
    outcomes = iter(
        [
            outcome
            for operation, result in zip(operations, results, strict=True)
            for outcome in (result.value if result.error is None else [result] * len(operation.handles))
        ]
    )
    entries: list[HandlingEntry | problems.Problem] = list(body.handlings)
    documents = [
        {"handled": None, "problem": entry.content()}
        if isinstance(entry, problems.Problem)
        else _result(path, next(outcomes))
        for entry in entries
    ]
    return Reply.of({"results": documents})


def _result(path: str, outcome: Done) -> dict[str, Any]:
    if outcome.error is None:
        return {"handled": _handled(outcome.value), "problem": None}
    if isinstance(outcome.error, errors.CoreError) and outcome.error.code != "internal":
        return {"handled": None, "problem": problems.from_core(outcome.error).content()}
    log.error("request_failed", path=path, exc_info=outcome.error)
    return {"handled": None, "problem": problems.internal().content()}


# An instance's name may contain slashes. So these routes must precede `/{process}/{instance:rest}`.
@router.post(
    "/{process}/{instance:rest}/handle",
    response_model=HandledAnswer,
    responses=documented("process_not_found", "stale_epoch", "version_conflict", "step_reused", *BODY),
)
@needs(Role.CONSUME)
async def handle_event(process: ProcessName, instance: InstanceName, body: HandleBody, request: Request) -> Response:
    """Store the effect of an event on an instance, once, in one transaction: its state, its commands, its timers.

    409 `stale_epoch`: the worker no longer owns the partition at this epoch. 409 `version_conflict`: the state has
    changed; compute the effect again from the current state. 422 `step_reused`: a command that isn't `once` has the
    step of another one; park the event with this error.
    """
    writes: Writes = request.app.state.writes
    return free_json.response(_handled(await writes.run(handle_of(_handling(process, instance, body)))))


def _commands(body: HandleBody) -> list[outbox.NewCommand]:
    numbers: Counter[str] = Counter()
    commands = []
    for command in body.commands:
        step = command.step or command.type
        if command.step is None and not command.once:
            numbers[command.type] += 1
            step = outbox.step_of(command.type, numbers[command.type], body.event.id)
        commands.append(outbox.NewCommand(step, command.type, command.data, command.once))
    return commands


def _handling(process: str, instance: str, body: HandleBody) -> instances.Handling:
    return instances.Handling(
        process,
        instance,
        body.event.id,
        body.event.position,
        body.fence.worker,
        body.fence.epoch,
        body.version,
        body.state,
        _commands(body),
        [timers.TimerChange(timer.timer, _seconds(timer.after), timer.data) for timer in body.timers],
        body.finish,
        body.error,
        body.strict,
    )


def _handled(handled: instances.Handled) -> dict[str, Any]:
    return {
        "status": handled.status,
        "repeated": handled.repeated,
        "instance": None if handled.instance is None else _instance(handled.instance),
        "commands": handled.commands,  # a dataclass with the fields of `IssuedCommand`
    }


@router.post(
    "/{process}/{instance:rest}/retry",
    response_model=Retried,
    responses=documented("process_not_found", "instance_not_found", *BODY),
)
@needs(Role.CONSUME)
def retry_parked_events(
    process: ProcessName, instance: InstanceName, body: RetryBody, request: Request
) -> dict[str, Any]:
    """Handle the instance's parked events, or one of them, again."""
    return {"retrying": _service(request).processes.retry_parked(process, instance, body.event)}


@router.get(
    "/{process}/{instance:rest}",
    response_model=InstanceDetails,
    responses=documented("process_not_found", "instance_not_found", "invalid_request"),
)
@needs(*ANY)
def get_instance(process: ProcessName, instance: InstanceName, request: Request) -> Response:
    """One instance: its state, its events, its timers and its commands."""
    details = _service(request).processes.instance(process, instance)
    return free_json.response(
        {
            **_instance(details.instance),
            "history": [{name: getattr(entry, name) for name in InboxEntry.model_fields} for entry in details.history],
            "timers": [
                {"timer": timer.timer, "due_at": timer.due_at, "data": free_json.stored(timer.data)}
                for timer in details.timers
            ],
            "commands": [command_json(command) for command in details.commands],
        }
    )
