"""`python -m examples.ordered`: events of three users, handled in parallel but in order per user, by a process that is
killed and restarted.

Nothing is simulated: the worker is killed by SIGKILL while it works, and leaves only its effects and the last position
that it stored. The example needs the standard library and lastbit, but no service.

    __main__   the command: starts and kills workers, prints the result
    worker     reads and handles events, stores its position
    files      the events, the effects and the position on disk
    proof      the final checks
"""
