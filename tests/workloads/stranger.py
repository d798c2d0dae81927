"""A script that has never heard of us."""

import sys
import time

time.sleep(float(sys.argv[1]))
