"""``python -m tilework`` is the command ``tilework``."""

from tilework.cli import main

if __name__ == "__main__":
    main()
