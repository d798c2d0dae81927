"""``python -m resilience.run``: the same as ``resilience run``."""

import sys

from resilience.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
