"""Redistribution: from one layout of a DTensor to another."""
