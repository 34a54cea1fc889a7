"""Ordinary training and inference programs, whose steps run as they are and captured."""
