"""Output for people: layouts as a line (``formatting.py``); collectives of a program with causes,
and warnings of gathers (``causes.py``).
"""
