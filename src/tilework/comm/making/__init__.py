"""The making of groups: participants, attempts, and plans of groups."""
