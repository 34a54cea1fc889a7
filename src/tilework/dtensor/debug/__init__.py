"""For people: layouts in a line (``formatting.py``) and drawn (``picture.py``); the collectives of
a program with their causes and warnings of gathers (``explain.py``, listed by ``event_log.py``).
"""
