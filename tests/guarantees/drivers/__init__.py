"""Helpers that drive the service in a scenario: load, rounds of a race, sessions that hold rows locked, releases beside
each other, journaled batches.
"""
