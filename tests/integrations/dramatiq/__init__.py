"""The adapter for Dramatiq."""
