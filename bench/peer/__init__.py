"""The peers of the benchmarks: other ways to detect the end of a batch, each as its users run it, one a file."""
