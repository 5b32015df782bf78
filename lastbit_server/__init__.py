"""The package that `pip install lastbit-server` installs: one command that runs the service and its jobs.

The programs themselves are `api`, `core`, `jobs`, `migrations` and `senders`. Such general names must not be installed
in a user's site-packages. So the wheel contains them in `_app/`, and `lastbit_server.__main__` puts that folder first
on the path. A checkout has no `_app/`: there they are at the top level.
"""
