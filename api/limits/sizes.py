"""The size of one request."""

from __future__ import annotations

from typing import Final

BODY: Final = 8 * 1024 * 1024
"""Maximum bytes of a body."""
BODY_OF_NUMBERS: Final = 64 * 1024
"""The same for a route that takes some numbers and names. A route that takes more declares it (`fields.Body.LIMIT`)."""
IN_LOOP: Final = 4096
"""Maximum bytes of a body that is parsed in the event loop, and not in a thread: its parsing takes up to a millisecond,
whatever it contains."""
IN_LOOP_FAST: Final = 64 * 1024
"""The same for the fast path, which only serves tokens without limits."""
DEPTH: Final = 100
"""Maximum levels of nested arrays and objects in JSON that the service stores for a caller. Every JSON parser has a
limit (Python's is near 1,000), and this one is below all of them."""
HEAD: Final = 65_536
"""Maximum bytes of a request's head, not counting the read that contained its first byte."""
HEADERS: Final = 200
"""Maximum headers of a request."""
PATH: Final = 8192
"""Maximum bytes of a path. The longest one that a route may have has two names of 255 characters."""
PARAMETERS: Final = 500
"""Maximum parameters of a query. Each costs about a microsecond, before anything is known of the caller."""
WHOLE: Final = 8 * BODY
"""Maximum bytes of a request, including the framing of its chunks, counted as for `HEAD`."""
DISCARDED: Final = 8 * BODY
"""Maximum bytes that are discarded of a request that was refused before its end."""
