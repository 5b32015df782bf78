"""The peers of the benchmarks: other ways to know that a batch is done, each as its users run it, one per file."""
