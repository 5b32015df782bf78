"""`python -m examples.ordered`: events of three users, handled in parallel, each user's in order, by a process that is
killed and started again.

Nothing of it is simulated: the worker is a process that is killed by SIGKILL, from outside, at work, and all that it
leaves is its effects and the last position that it wrote down. It needs the standard library and lastbit, no service.

    __main__   the command: who is started, who is killed, what is said
    worker     reads, handles, writes its position down
    files      the events, the effects and the position, on disk
    proof      what must add up in the end
"""
