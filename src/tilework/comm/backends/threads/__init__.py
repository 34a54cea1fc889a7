"""The ``threads`` backend: ranks that are threads of one process."""
