"""Forty partitions, six workers that join one by one; one is killed. See `__main__.py`."""
