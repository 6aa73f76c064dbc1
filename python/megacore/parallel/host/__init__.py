"""Transports of CPU tensors: shared memory of a host, and messages of gloo between hosts."""
