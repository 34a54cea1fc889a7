"""Views of DTensors.

``moved_views.py`` has views whose elements had to be moved: snapshots that may be written through;
``places.py`` has counts of writes.
"""
