"""Process managers: state machines that take events and issue commands.

`definitions` has the processes, and `instances` their instances. `handling` applies events to instances. `inbox`
records the events, `outbox` the commands and `timers` the time-outs. `retention` removes instances that finished long
ago.

A new kind of request from a handler, next to commands and timers, gets a module like `timers`, and `handling`
writes it.
"""
