"""The making of groups: who takes part, in which attempt, and what a group is to be."""
