"""A script that has never heard of us. It ends after some seconds, and not before a file is there if one is named."""

import sys
import time
from pathlib import Path

time.sleep(float(sys.argv[1]))
while not all(Path(name).exists() for name in sys.argv[2:]):
    time.sleep(0.02)
