"""Views of DTensors.

``moved_views.py`` has views whose elements had to be moved: snapshots that may be written through;
``resize_shards.py`` finds the layouts of slices and padded tensors whose elements stay in place.
"""
