"""What a ruling means for the launchers: who ends how, and what the report says of each. Pure: no process, no clock."""

from __future__ import annotations

from resilience.launcher.agreement import Node
from resilience.launcher.fitness import consequences
from resilience.nodecheck.judging import Judgement, Ruling
from resilience.observe.report import as_text

NODES = [Node("host", (at,), f"id{at}", f"n{at}") for at in range(4)]


def test_report_says_of_every_node_that_is_out_why() -> None:
    judged = (
        Judgement(0, "healthy"),
        Judgement(1, "faulty", "the product is wrong"),
        Judgement(2, "straggler", "its GEMM takes 9 s"),
        Judgement(3, "vanished", "it was gone before the check was over"),
    )
    result = consequences(Ruling(judged), NODES, 0, True, run="r", cycle=0, at=1.0)
    assert result.report is not None
    shown = " ".join(as_text(result.report, "/run").split())
    for why in ("the product is wrong", "its GEMM takes 9 s", "it was gone before the check was over"):
        assert shown.count(why) == 1, shown
    assert "node 2 (host (n2)) ends with exit code 80 (straggler: its GEMM takes 9 s)" in shown
