"""What DTensors look like, and what they communicate."""
