"""The specifying documents' own tests, with their imports changed."""
