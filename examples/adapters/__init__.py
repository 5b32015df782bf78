"""A small program for each adapter of `lastbit.integrations`, to start from."""
