"""``python -m compilepass``."""

from .cli import main

if __name__ == "__main__":
    main()
