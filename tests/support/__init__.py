"""Helpers that tests of several folders share: real servers and brokers, proxies, clocks, receivers of webhooks,
database templates. A helper that only one folder needs stays in that folder.
"""
