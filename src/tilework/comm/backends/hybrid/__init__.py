"""The ``hybrid`` backend: shared memory within each host, torch's engines between hosts."""
