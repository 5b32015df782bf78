"""`make demo`: a real fan-out, with crashes and duplicates, to its exact end.

The items are the files of the running interpreter's standard library. A producer publishes them to a queue that
duplicates and reorders messages, and consumers parse them. Meanwhile processes are killed by SIGKILL. Nothing is
simulated: the service, the queue, the producer and the consumers are separate processes that communicate by address.

    __main__   the command
    run        starts and kills the processes, and detects the end
    producer, consumer, broker   the processes
    proof      the final checks, and the closing lines
"""
