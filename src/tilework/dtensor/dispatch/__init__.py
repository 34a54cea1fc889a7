"""Dispatch of torch's functions on DTensors."""
