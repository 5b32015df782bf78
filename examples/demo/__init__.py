"""`make demo`: a real fan-out, with crashes and duplicates, to its exact end.

The items are the files of the running interpreter's standard library. A producer hands them to a queue that duplicates
and reorders, consumers parse them, and processes are killed on the way: SIGKILL, from outside, at work. Nothing of it
is simulated: the service, the queue, the producer and the consumers are processes that know each other by address only.

    __main__   the command
    run        the course of the demo: who is started, who is killed, when it is over
    producer, consumer, broker   the processes
    proof      what must add up in the end, and the closing lines
"""
