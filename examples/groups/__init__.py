"""Forty partitions, four workers; two join, one is killed. See `__main__.py`."""
