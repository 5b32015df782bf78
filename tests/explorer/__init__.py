"""The interleaving explorer: real code on real database sessions, with schedules enumerated rather than drawn at
random.

Each session runs one operation and stops before every statement (`sessions`). The search (`search`) decides which
session continues, and tries every possibility: all interleavings of two operations, and those of three with at most two
preemptions. A preemption interrupts a session that could have continued; most races need one or two (Musuvathi and
Qadeer, Iterative Context Bounding for Systematic Testing of Multithreaded Programs, 2007). Every outcome (bits, counts,
states, events, responses) must also result from some order of whole transactions, and the batches must verify.

`make explore` runs all of it, `python -m tests.explorer replay SCHEDULE` one schedule, with its steps. A new operation
is a line in `operations`, a new scene one in `scene`, another database a class in `databases`.
"""
