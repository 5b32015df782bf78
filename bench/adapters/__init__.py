"""A module for each adapter that `bench.integrations` measures, with the no-op task that its workers run."""
