"""The adapter for RQ."""
