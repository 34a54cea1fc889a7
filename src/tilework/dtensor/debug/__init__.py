"""Output for people: layouts as a line (``formatting.py``) and as a picture (``picture.py``); the
collectives of a program with causes, and warnings of gathers (``causes.py``, ``event_log.py``).
"""
