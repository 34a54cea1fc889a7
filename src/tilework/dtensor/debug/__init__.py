"""For people: layouts in a line (``formatting.py``), pictures (``show.py``), and the collectives of
a program with their causes, warnings of gathers included (``explain.py``).
"""
