"""Views of DTensors: copies that stand for views, and parts of sharded dims."""
