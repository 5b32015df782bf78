"""Tallies: `client.tally("screws")` counts each message once, however often it is replayed, and says the totals.

The messages of one source must come to a key in their order. One message adds one entry per key.
"""
