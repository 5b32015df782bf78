"""The interleaving explorer: real code on real database sessions, its schedules enumerated rather than drawn.

Each session runs one operation and stops before every statement (`sessions`). The search (`search`) decides which one
goes on, and tries every way: all interleavings of two operations, and those of three with at most two preemptions. A
preemption interrupts a session that could have gone on; most races need one or two (Musuvathi and Qadeer, Iterative
Context Bounding for Systematic Testing of Multithreaded Programs, 2007). Every outcome (bits, counts, states, events,
responses) must be one that some order of whole transactions has, and the batches must verify.

`make explore` runs all of it, `python -m tests.explorer replay SCHEDULE` one schedule, with its steps. A new operation
is a line in `operations`, a new scene one in `scene`, another database a class in `databases`.
"""
