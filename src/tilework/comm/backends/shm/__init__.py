"""The ``shm`` backend: shared memory of the ranks of one host."""
