"""``python -m resilience.run``: the same as ``resilience run``."""

import sys

from resilience.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
