"""Helpers that drive the service in a scenario: load, race rounds, sessions that hold row locks, two releases on one
database, journaled batches.
"""
