# The names of __init__.py for type checkers, which cannot look inside its table.
from lastbit.processes.calls import AsyncProcesses as AsyncProcesses, Processes as Processes
from lastbit.processes.definition import (
    CancelTimer as CancelTimer,
    Command as Command,
    Finish as Finish,
    Process as Process,
    Timer as Timer,
    process as process,
    timer_of as timer_of,
)
from lastbit.processes.models import (
    CommandPage as CommandPage,
    Definition as Definition,
    Handled as Handled,
    Instance as Instance,
    InstanceDetails as InstanceDetails,
    Issued as Issued,
    IssuedCommand as IssuedCommand,
    PendingTimer as PendingTimer,
    ProcessSummary as ProcessSummary,
    Received as Received,
)
from lastbit.processes.worker import ProcessWorker as ProcessWorker, run as run
