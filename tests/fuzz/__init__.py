"""Whole programs at random, on DTensors and on plain tensors: ``python -m tests.fuzz --help``.

``language.py`` has the words of a program, with their meaning for each of the two;
``statements.py`` makes statements at random, ``fairness.py`` says which mean one thing only;
``views.py`` and ``outside.py`` make programs about one subject; ``programs.py`` makes, runs and
compares them; ``minimise.py`` makes them short.
"""
