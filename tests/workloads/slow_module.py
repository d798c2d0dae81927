"""A module whose import never ends, on one rank."""

import os
import time

if os.environ["RANK"] == "1" and os.environ["RESILIENCE_CYCLE"] == "0":
    time.sleep(1000)
