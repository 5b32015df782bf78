"""Tallies: `client.tally("screws")` counts each message once, however often it is replayed, and returns the totals.

The messages of one source must reach a key in order. One message adds one entry per key.
"""
