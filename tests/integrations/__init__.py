"""The adapters of `lastbit.integrations`, each with its library and broker, and the fan-out that they share."""
