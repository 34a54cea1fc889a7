"""Pipelines: models cut into stages, which run microbatches in an order that is a proven value.

- ``actions``: what a rank does with a stage and a microbatch; messages; costs;
- ``proof``: an order of actions is complete, has no circle, and so has an order of messages that no
  engine can hang in;
- ``listing``: the list scheduler, which makes orders from rules and costs;
- ``schedule``: the value;
- ``notation``: a schedule as text, as a picture, and from torch's tables.
"""
