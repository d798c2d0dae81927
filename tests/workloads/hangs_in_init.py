"""Rank 1 never comes to init_process_group; rank 0 waits there. Neither has called us."""

import os
import time

import torch.distributed as dist

import resilience

if os.environ["RANK"] == "1" and os.environ["RESILIENCE_CYCLE"] == "0":
    time.sleep(1000)
dist.init_process_group("gloo")
resilience.heartbeat(0)
dist.destroy_process_group()
