"""``python -m tests.simulation``: how soon a hang is found, and how many false alarms a long run has."""

from __future__ import annotations

import sys

from tests.simulation.traces import PLANS, Plan, Simulation

SEEDS = 3
STEPS = 2500


def false_alarms(plan: Plan) -> int:
    """Count the false alarms of several long runs, each with two restarts."""
    alarms = 0
    for seed in range(SEEDS):
        job = Simulation()
        alarms += sum(job.live(plan.actions(10 * seed + life, STEPS)).verdict is not None for life in range(3))
    return alarms


def found_after(plan: Plan, place: str, step: int) -> str:
    """Return the longest time until a hang was found, over the seeds, and by which clock."""
    worst, clock = 0.0, ""
    for seed in range(SEEDS):
        end = Simulation().live(plan.actions(seed, step + 300), hang=(place, step))
        if not end.hung:
            return "-"
        if end.found_s > worst and end.verdict is not None and end.verdict.clock is not None:
            worst, clock = end.found_s, end.verdict.clock.name
    return f"{worst:.0f} s ({clock.removeprefix('section:')})"


def after_restart(plan: Plan) -> str:
    """Return the time until a hang in the second step of a second life was found."""
    job = Simulation()
    job.live(plan.actions(0, 500))
    return f"{job.live(plan.actions(1, 100), hang=('step', 1)).found_s:.0f} s"


def main() -> None:
    """Print the table, as Markdown."""
    rows: list[list[str]] = [
        [
            "training",
            f"false alarms in {3 * SEEDS} × {STEPS} steps",
            "hang in step 5",
            "in step 25",
            "in step 1000",
            "in an evaluation after step 1000",
            "in step 1 after a restart",
        ],
        ["---"] * 7,
    ]
    for name, plan in PLANS.items():
        row = [name, str(false_alarms(plan)), *(found_after(plan, "step", step) for step in (5, 25, 1000))]
        row += [found_after(plan, "evaluate", 1000) if plan.evaluate_every else "-", after_restart(plan)]
        rows.append(row)
    for row_ in rows:
        sys.stdout.write("| " + " | ".join(row_) + " |\n")


if __name__ == "__main__":
    main()
