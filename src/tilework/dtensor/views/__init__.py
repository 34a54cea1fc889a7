"""Views of DTensors.

``copied_views.py`` keeps views whose elements had to be moved in step with their base;
``resize_shards.py`` finds the layouts of slices and padded tensors whose elements stay in place.
"""
