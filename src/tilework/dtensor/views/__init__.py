"""Views of DTensors.

``copied_views.py`` keeps views whose elements had to be moved in step with their base;
``resize_shards.py`` has the shards of a tensor of which a part is kept or that is padded.
"""
