"""The routes of process managers: their workers write what an event does, and people see what became of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from api import patterns
from api.access.rules import ANY, needs
from api.problems import BODY, documented
from api.routes import cursors, free_json
from api.routes.commands import Command, Limit, command_json
from api.routes.consumer_groups import Epoch
from api.routes.consumer_groups import Name as WorkerName
from api.routes.events import Name
from api.routes.free_json import DATA, MAX_STATE, Data, State
from api.routes.models import Body
from api.routes.route import JsonRoute
from api.server.bodies import DEPTH
from core import tables
from core.consumer_groups import groups
from core.processes import definitions, instances, outbox, timers
from core.service import Service
from lastbit.ids import INTEGER_LIMIT
from lastbit.names import NO_NAMES
from lastbit.tokens import Role

router = APIRouter(prefix="/v1/processes", route_class=JsonRoute, tags=["processes"])

MAX_COMMANDS: Final = 100
LONGEST_TIMER: Final = 10 * 365 * 86_400


def _unicode(value: str) -> str:
    """Half a surrogate pair is no text that a database takes."""
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


ProcessName = Annotated[
    str,
    Path(
        alias="process",
        pattern=rf"^[A-Za-z0-9][A-Za-z0-9._:-]{{0,{tables.PROCESS_NAME - 1}}}$",
        description="a letter or digit, then up to 199 of these and of `.` `_` `:` `-`",
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
CommandType = Annotated[str, StringConstraints(pattern=rf"^[\x21-\x7e]{{1,{tables.PROCESS_NAME}}}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=255), AfterValidator(_unicode)]
Cursor = Annotated[str | None, Query(description="`next` of the page before")]
StatusName = Literal["running", "finished", "parked"]


class ProcessBody(Body):
    partitions: int | None = Field(
        None, ge=1, le=groups.MOST_PARTITIONS, description=f"fixed from then on; {definitions.PARTITIONS} at first"
    )
    ttl: float | None = Field(
        None, ge=0.1, le=3600, allow_inf_nan=False, description="seconds that a worker may be silent; 10 at first"
    )
    release: float | None = Field(
        None, ge=0, le=3600, allow_inf_nan=False, description="seconds that a worker has to drain; 30 at first"
    )
    after: int | None = Field(
        None, ge=0, lt=INTEGER_LIMIT, description="a new one begins above this position; null: all that is kept"
    )


class HandledEvent(Body):
    id: Name
    position: int = Field(ge=1, lt=INTEGER_LIMIT)


class ProcessFence(Body):
    worker: WorkerName
    epoch: Epoch = Field(description="of the instance's partition, as the worker's sync said")


class NewCommand(Body):
    type: CommandType = Field(description="its event's type is this after `command.`")
    step: Text | None = Field(None, description="an instance issues each step once; null: the type")
    data: Data = Field(None, description=DATA)


class NewTimer(Body):
    timer: Text = Field(description="its name; a timer of that name is replaced")
    after: float | None = Field(
        None, ge=0, le=LONGEST_TIMER, allow_inf_nan=False, description="seconds from now; null: cancel it"
    )
    data: Data = Field(None, description=f"{DATA}; it comes with the event")


class HandleBody(Body):
    event: HandledEvent
    fence: ProcessFence
    version: int = Field(ge=0, lt=INTEGER_LIMIT, description="of the state this was computed from; 0: there was none")
    state: State = Field(
        None, description=f"the new state: any JSON, at most {MAX_STATE:,} bytes and {DEPTH} levels of nesting"
    )
    commands: list[NewCommand] = Field(default_factory=list, max_length=MAX_COMMANDS)
    timers: list[NewTimer] = Field(default_factory=list, max_length=MAX_COMMANDS)
    finish: bool = Field(False, description="the instance ends here: later events change nothing")
    error: Annotated[str, StringConstraints(min_length=1, max_length=8192), AfterValidator(_unicode)] | None = Field(
        None, description="the handler failed: park the event, and do nothing else of this"
    )


class RetryBody(Body):
    event: Name | None = Field(None, description="its id; null: all that are parked, at most 1,000")


class Process(BaseModel):
    name: str
    group: str = Field(description="the consumer group of its workers")
    partitions: int
    after: int = Field(description="its workers begin above this position where a partition has none of its own yet")
    created_at: datetime


class ProcessSummary(Process):
    running: int = Field(description="instances")
    finished: int
    parked: int = Field(description="events whose handler failed")
    timers: int
    floor: int = Field(description="all events up to this position were handled")


class Processes(BaseModel):
    processes: list[ProcessSummary]


class ProcessInstance(BaseModel):
    process: str
    instance: str
    status: Literal["running", "finished"]
    version: int = Field(description="goes up with every event that was handled")
    state: Any
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    parked: int = Field(description="events whose handler failed")


class InstancePage(BaseModel):
    instances: list[ProcessInstance]
    next: str | None


class InboxEntry(BaseModel):
    event: str = Field(description="its id")
    position: int
    status: Literal["handled", "parked", "retrying", "late"] = Field(
        description="parked: its handler failed; late: it came after the instance's end"
    )
    error: str | None
    at: datetime


class ProcessTimer(BaseModel):
    timer: str
    due_at: datetime
    data: Any


class InstanceDetails(ProcessInstance):
    history: list[InboxEntry] = Field(description="the newest 200 events that came to it, newest first")
    timers: list[ProcessTimer]
    commands: list[Command] = Field(description="the newest 200, newest first")


class IssuedCommand(BaseModel):
    id: str
    step: str
    position: int
    repeated: bool = Field(description="it had been issued before, and stands where it stood")


class HandledAnswer(BaseModel):
    status: Literal["handled", "parked", "late", "retrying"] = Field(description="what became of the event")
    repeated: bool = Field(description="that had been so before, and this call changed nothing")
    instance: ProcessInstance | None = Field(description="as it is now")
    commands: list[IssuedCommand]


class Retried(BaseModel):
    retrying: int = Field(description="events that are handled again")


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
        201: {"model": Process, "description": "it is new"},
        **documented("partitions_fixed", "consumer_group_in_use", "position_trimmed", *BODY),
    },
)
@needs(Role.CONSUME)
def put_process(process: ProcessName, body: ProcessBody, request: Request, response: Response) -> dict[str, Any]:
    """Define a process, with the consumer group of its workers, or change how long these may be silent and may take to
    drain. 201 where it is new, else 200."""
    definition, new = _service(request).processes.define(
        process,
        partitions=body.partitions,
        ttl=_seconds(body.ttl),
        release=_seconds(body.release),
        after=body.after,
    )
    response.status_code = 201 if new else 200
    return _definition(definition)


@router.get("", response_model=Processes, responses=documented())
@needs(*ANY)
def list_processes(request: Request) -> dict[str, Any]:
    """The processes, by name, with the numbers of their instances."""
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
    status: Annotated[StatusName | None, Query(description="parked: those with parked events")] = None,
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
    """Remove a process with its instances. Its commands can be pulled as long as their events are kept.
    Refused while workers are in its group."""
    _service(request).processes.delete(process)
    return Response(status_code=204)


# An instance's name may have slashes, so these come before the plain one.
@router.post(
    "/{process}/{instance:rest}/handle",
    response_model=HandledAnswer,
    responses=documented("process_not_found", "stale_epoch", "version_conflict", *BODY),
)
@needs(Role.CONSUME)
def handle_event(process: ProcessName, instance: InstanceName, body: HandleBody, request: Request) -> Response:
    """Do what an event does to an instance, once, in one transaction: its state, its commands, its timers.

    409 `stale_epoch`: the partition is another worker's by now. 409 `version_conflict`: compute it again from the
    state as it is now.
    """
    handled = _service(request).processes.handle(
        instances.Handling(
            process,
            instance,
            body.event.id,
            body.event.position,
            body.fence.worker,
            body.fence.epoch,
            body.version,
            body.state,
            [outbox.NewCommand(command.step or command.type, command.type, command.data) for command in body.commands],
            [timers.TimerChange(timer.timer, _seconds(timer.after), timer.data) for timer in body.timers],
            body.finish,
            body.error,
        )
    )
    return free_json.response(
        {
            "status": handled.status,
            "repeated": handled.repeated,
            "instance": None if handled.instance is None else _instance(handled.instance),
            "commands": [
                {name: getattr(command, name) for name in IssuedCommand.model_fields} for command in handled.commands
            ],
        }
    )


@router.post(
    "/{process}/{instance:rest}/retry",
    response_model=Retried,
    responses=documented("process_not_found", "instance_not_found", *BODY),
)
@needs(Role.CONSUME)
def retry_parked_events(
    process: ProcessName, instance: InstanceName, body: RetryBody, request: Request
) -> dict[str, Any]:
    """Have the instance's parked events, or one of them, handled again."""
    return {"retrying": _service(request).processes.retry_parked(process, instance, body.event)}


@router.get(
    "/{process}/{instance:rest}",
    response_model=InstanceDetails,
    responses=documented("process_not_found", "instance_not_found", "invalid_request"),
)
@needs(*ANY)
def get_instance(process: ProcessName, instance: InstanceName, request: Request) -> Response:
    """One instance: its state, the events that came to it, its timers and its commands."""
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
