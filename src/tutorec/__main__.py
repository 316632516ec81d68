"""``python -m tutorec``: the command ``tutorec``."""

import sys

from tutorec.cli import main

if __name__ == "__main__":
    sys.exit(main())
