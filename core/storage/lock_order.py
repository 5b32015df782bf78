"""The lock of the feed's head: the last one of a transaction.

Every transaction that appends takes it, so it says nothing about a batch: whoever waits for it would wait in any other
transaction too. Its statement waits for as long as the session allows, however briefly the transaction waits for other
rows, and a time-out is a fault of its own (`errors.Fault.HEAD_WAIT`).
"""

from __future__ import annotations

from typing import Final

HEAD: Final = "SELECT position, trimmed FROM feed_head WHERE id = 1"
LOCK_HEAD: Final = f"{HEAD} FOR UPDATE"
"""The statement that locks the head on a server. It is recognized by its text, so there is no other one."""
