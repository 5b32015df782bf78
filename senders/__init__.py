"""HTTP clients that the service and its jobs pass to core. Core decides what to send, and these clients send it."""
