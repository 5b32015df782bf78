"""What `pip install lastbit-server` installs: one command that runs the service and its jobs.

The programs themselves are `api`, `core`, `jobs`, `migrations` and `senders`. Names like these must not reach a user's
site-packages, so the wheel carries them in `_app/`, and `lastbit_server.__main__` puts that folder first on the path.
In a checkout there is no `_app/`: they are at the top level.
"""
