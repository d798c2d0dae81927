"""Start a monitor without ``site``: no user packages, no import hooks, as little memory as Python can do with."""

import sys

sys.path.append(__file__.rsplit("/", 3)[0])

from resilience.monitor.process import main

main(sys.argv[1:])
