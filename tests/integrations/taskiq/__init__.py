"""The adapter for taskiq."""
