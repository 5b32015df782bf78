"""Screws that robots fasten, counted behind a republisher: both die and come back, and the totals are the truth."""
