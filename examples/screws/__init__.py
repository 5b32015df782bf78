"""Counts screws that robots fasten, behind a republisher. Both processes crash and restart; the totals stay correct."""
