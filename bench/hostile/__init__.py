"""The attacks of `bench.neighbours`."""
