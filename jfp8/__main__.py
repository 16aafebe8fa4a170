"""The command ``python -m jfp8``."""

import sys

from jfp8.command_line.parser import main

if __name__ == "__main__":
    sys.exit(main())
