"""Provenance of DTensors: digests of how they came about, by which ranks notice that they differ.

``mode.py`` says how much is compared, ``content.py`` hashes elements, ``digests.py`` has the digest
of each tensor, and ``meaning.py`` lets collectives carry it. ``docs/concepts/alike.md`` explains.
"""
