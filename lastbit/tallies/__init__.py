"""Tallies: `client.tally("screws")` counts each message once, however often it is replayed, and says the totals.

The messages of one source must come to a key in their order. What one message brings to one key is one entry.
"""
