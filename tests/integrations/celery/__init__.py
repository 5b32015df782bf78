"""The adapter for Celery, with real workers on real brokers."""
