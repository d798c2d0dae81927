"""A script as users of ft_launcher write it; only the import is ours. Rank 1 hangs once, in an outer section."""

import json
import os
import time
from pathlib import Path

from resilience import RankMonitorClient

rank, cycle = os.environ["RANK"], os.environ["RESILIENCE_CYCLE"]
saved = Path(os.environ["PROGRESS"]) / f"state_{rank}.json"

client = RankMonitorClient()
client.init_workload_monitoring()
if saved.exists():
    client.load_state_dict(json.loads(saved.read_text()))
client.start_section("setup")
client.end_section("setup")
for step in range(30):
    client.start_section("epoch")
    client.start_section("step")
    time.sleep(0.02)
    client.end_section("step")
    client.send_heartbeat()
    if step == 25:
        client.end_all_sections()
        client.calculate_and_set_hb_timeouts()
        client.calculate_and_set_section_timeouts()
        saved.write_text(json.dumps(client.state_dict()))
        client.start_section("epoch")
    if step == 27 and rank == "1" and cycle == "0":
        while True:  # inner sections and heartbeats go on; the outer section never ends
            client.start_section("step")
            time.sleep(0.02)
            client.end_section("step")
            client.send_heartbeat()
    client.end_section("epoch")
timeouts = [
    client.hb_timeouts.subsequent,
    client.section_timeouts.section["step"],
    client.section_timeouts.out_of_section,
]
with (Path(os.environ["PROGRESS"]) / f"rank_{rank}").open("a") as file:
    file.write(f"{cycle} {json.dumps(timeouts).replace(' ', '')} 0 0\n")
client.shutdown_workload_monitoring()
