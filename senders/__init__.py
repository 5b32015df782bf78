"""HTTP clients that the service and its jobs hand to core: core knows what is to be sent, these know how."""
