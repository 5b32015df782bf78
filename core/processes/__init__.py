"""Process managers: state machines that take events and issue commands.

`definitions` has the processes, `instances` their instances and what an event does to one. `inbox` records the events,
`outbox` the commands, `timers` the time-outs, and `retention` removes what is no longer needed.

A new kind of request from a handler, next to commands and timers, gets a module like `timers`, and `instances.handle`
writes it.
"""
