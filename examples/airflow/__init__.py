"""A DAG that fans out, and a worker for its messages."""
