"""DTensor: one tensor over the ranks of a mesh, with torch's operators on it."""
