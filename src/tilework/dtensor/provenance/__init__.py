"""Provenance of DTensors: digests of how they came about, by which ranks notice that they differ.

``content.py`` hashes elements, as far as the mode says. ``digests.py`` has the digest of each
tensor, and lets collectives carry it. ``replicas.py`` compares replicated parts.
``docs/concepts/alike.md`` explains.
"""
