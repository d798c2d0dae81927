"""What follows when the launchers of a Slurm job have ended. No Slurm is needed: these are decisions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("resilience.integrations.slurm", reason="not installed here: resilience.integrations")

from resilience.integrations.slurm.chain import Decision, History, Situation, decide, settled, too_few, without_memory

from resilience.failover.ends import NodeEnd


def ends(*codes: int) -> tuple[NodeEnd, ...]:
    return tuple(NodeEnd(f"n{number}", code) for number, code in enumerate(codes, 1))


def after(*codes: int, **more: Any) -> Decision:
    """What follows in a job that needs all of its nodes, if it is not said otherwise."""
    size = dict.fromkeys(("nodes", "needed", "most"), len(codes))
    return decide(Situation(max(codes), ends(*codes), **{**size, **more}))


def test_all_ended_with_0_ends_the_chain() -> None:
    assert (after(0, 0).requeue, after(0, 0).code) == (False, 0)


def test_finished_without_a_node_that_left_is_finished_though_srun_says_201() -> None:
    for decision in (after(0, 201, 0, needed=2, most=2), after(0, 201, 0, needed=2)):
        assert (decision.requeue, decision.code) == (False, 0)


@pytest.mark.parametrize(
    ("codes", "nodes", "needed", "most", "finished"),
    [
        # two nodes, and both are needed
        ((0, 0), 2, 2, 2, True),
        ((0, 79), 2, 2, 2, False),
        ((0, 75), 2, 2, 2, False),
        ((0, 1), 2, 2, 2, False),
        ((0, 201), 2, 2, 2, False),
        ((0,), 2, 2, 2, False),  # the other was killed
        ((), 2, 2, 0, False),  # nobody said anything: nothing has finished, whatever the flags say
        ((), 2, -1, 2, False),
        # and a spare
        ((0, 0, 75), 3, 2, 2, True),  # it was replaced
        ((0, 0, 1), 3, 2, 2, True),
        ((0, 0), 3, 2, 2, True),
        ((0, 201, 75), 3, 2, 2, False),
        ((0, 79), 3, 2, 2, False),
        # four nodes, of which two are enough
        ((0, 0, 0, 0), 4, 2, 4, True),
        ((0, 0, 0), 4, 2, 4, True),  # lost for good
        ((0, 0), 4, 2, 4, True),
        ((0, 0, 201, 75), 4, 2, 4, True),
        ((0, 0, 0, 79), 4, 2, 4, False),  # it still trained
        ((0, 0, 0, 1), 4, 2, 4, False),
        ((0,), 4, 2, 4, False),
        ((0, 201, 201, 201), 4, 2, 4, False),
        # fewer were allocated than the script was rendered for
        ((0, 0, 0), 3, 2, 4, True),
        # nobody has said anything
        ((), 2, 2, 2, False),
    ],
)
def test_job_is_finished_when_all_that_trained_have_said_0(
    codes: tuple[int, ...], nodes: int, needed: int, most: int, finished: bool
) -> None:
    decision = decide(Situation(max(codes, default=0), ends(*codes), nodes, needed, most))
    assert (not decision.requeue, decision.code == 0) == (finished, finished)
    assert ("finished: all workers ended with 0" in decision.why) is finished


def test_nodes_that_did_not_end_with_0_are_named_beside_those_that_did() -> None:
    cut_off = after(0, 75)
    assert "1 of 2 nodes ended with 0, and the others did not (n2 ended with 75, this node lost its job" in cut_off.why
    assert (cut_off.code, cut_off.history.counted) == (75, 1)
    assert (
        "1 of 2 nodes ended with 0, and the others did not (killed, or lost)" in after(0, nodes=2, needed=2, most=2).why
    )
    assert after(0, 201).exclude == ("n2",)
    assert after(0, 79).history.counted == 0, "asked to stop"
    assert (after(0, 77).requeue, after(0, 77).code) == (False, 77)
    assert not after(0, 79, state="CANCELLED").requeue


def test_marker_ends_the_chain_whatever_the_codes_are() -> None:
    assert after(79, 79, asked=True, finished=True).requeue is False
    assert after(79, 79, asked=True, finished=True).code == 0


def test_script_that_ended_with_0_before_its_marker_was_there_goes_on() -> None:
    decision = after(0, 0, finished=False)
    assert decision.requeue
    assert decision.history.counted == 1, "a script that never makes the marker must not go on for ever"


@pytest.mark.parametrize("code", [2, 77, 78])
def test_codes_that_say_stop_end_the_chain_with_that_code(code: int) -> None:
    decision = after(code, code)
    assert (decision.requeue, decision.code) == (False, code)
    assert str(code) in decision.why


def test_abortion_beside_a_node_that_left_is_still_an_abortion() -> None:
    assert (after(201, 77).requeue, after(201, 77).code) == (False, 77)


def test_preempted_job_is_requeued_however_often() -> None:
    decision = after(79, 79, history=History(counted=99), max_requeues=0)
    assert decision.requeue
    assert decision.history.counted == 99


def test_job_that_is_asked_to_stop_before_its_first_step_is_requeued_for_free_however_often() -> None:
    """Launchers whose script has not called us yet end with 1."""
    decision = after(1, 1, asked=True)
    for codes in ((1, 1), (1, 79), (79, 1)):
        decision = after(*codes, asked=True, history=decision.history, max_requeues=0)
        assert (decision.requeue, decision.history.counted, decision.failed_at_stop) == (True, 0, False)
        assert "asked to stop, and did" in decision.why


@pytest.mark.parametrize("codes", [(79, 79, 1), (79, 201, 1), (79, 1)])
def test_spare_that_ends_with_1_at_a_stop_has_not_failed(codes: tuple[int, ...]) -> None:
    """A launcher that waits is ended by the request itself."""
    before = History(1, "exit: y", 60)
    decision = after(*codes, asked=True, step=60, nodes=3, needed=2, most=2, history=before)
    assert (decision.requeue, decision.failed_at_stop, decision.history) == (True, False, before)
    again = after(1, 1, 1, step=60, nodes=3, needed=2, most=2, cause="exit: y", history=decision.history)
    assert not again.requeue, "that the failure repeats itself is seen over the stop in between"


def test_stop_that_failed_is_one_in_a_job_with_spares_too() -> None:
    size = {"asked": True, "step": 60, "nodes": 3, "needed": 2, "most": 2}
    assert "n2 ended with 1" in after(79, 1, 1, **size).why, "there is one spare"
    assert "n1 ended with 1" in after(1, 1, 1, **size).why
    assert "no space left" in after(79, 79, 1, stop_failure="exception of rank 0: OSError: no space left", **size).why


def test_last_save_that_failed_is_said_and_does_not_requeue_for_ever() -> None:
    def stop(history: History, step: int = 60) -> Decision:
        told = "exception of rank 0: OSError: no space left"
        return after(79, 79, asked=True, step=step, cause="exception: OSError", stop_failure=told, history=history)

    decision = stop(History())
    assert (decision.requeue, decision.code, decision.history.counted) == (True, 1, 0), "the first one is free"
    assert "failed at it (exception of rank 0: OSError: no space left)" in decision.why
    advanced = stop(decision.history, step=61)
    assert (advanced.requeue, advanced.history.counted) == (True, 0)
    counts = []
    while decision.requeue:
        decision = stop(decision.history)
        counts.append(decision.history.counted)
    assert counts == [1, 2, 3, 3]
    assert decision.code == 1
    assert "--max-requeues" in decision.why


def test_launcher_that_fails_at_every_stop_is_named_and_counted() -> None:
    first = after(1, 79, asked=True, step=60)
    assert (first.requeue, first.counted) == (True, False)
    assert "n1 ended with 1" in first.why
    again = after(1, 79, asked=True, step=60, history=first.history)
    assert (again.requeue, again.history.counted) == (True, 1)


def test_stops_that_fail_in_other_words_each_time_and_get_no_further_end_the_chain_too() -> None:
    """As where the name of a temporary file is in the message."""
    decision, free, counted = after(79, 79, asked=True, step=60, stop_failure="x", cause="exception: tmpaa"), 0, 0
    for word in ("tmpbb", "tmpaa", "tmpcc", "tmpdd"):
        free, counted = free + decision.failed_at_stop, counted + decision.counted
        decision = after(79, 79, asked=True, step=60, stop_failure="x", cause=word, history=decision.history)
    assert (decision.requeue, free, counted) == (False, 1, 3), decision
    further = after(79, 79, asked=True, step=61, stop_failure="x", cause="tmpee", history=decision.history)
    assert (further.requeue, further.failed_at_stop) == (True, True)


def test_clean_stop_after_an_earlier_failure_is_free() -> None:
    decision = after(79, 79, asked=True, cause="exit: y", step=7, history=History(1, "exit: y", 7))
    assert "asked to stop, and did" in decision.why
    assert decision.history.counted == 1


def test_stop_before_any_launcher_said_anything_is_free() -> None:
    decision = decide(Situation(138, asked=True))
    assert (decision.requeue, decision.counted) == (True, False)
    assert "srun ended with 138" in decision.why
    assert decide(Situation(79, asked=True)).why.startswith("asked to stop, and did"), "nothing was started"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", "PREEMPTED"])
def test_job_that_slurm_ends_is_not_requeued_though_its_launchers_end_with_79(state: str) -> None:
    decision = after(79, 79, state=state, asked=True)
    assert not decision.requeue
    assert state in decision.why


def test_job_whose_time_was_up_while_it_stopped_is_requeued() -> None:
    assert after(79, 79, state="TIMEOUT", asked=True).requeue


def test_faulty_node_is_excluded_and_the_requeue_counts() -> None:
    decision = after(1, 201, gave_up=True)
    assert (decision.requeue, decision.exclude, decision.history.counted) == (True, ("n2",), 1)
    assert "n2 ended with 201, driver error" in decision.why


def test_nodes_that_are_all_unfit_are_not_all_left_out() -> None:
    """As with a TMPDIR that is full for everybody: without any node the job would wait for ever."""
    first = after(80, 80, gave_up=True)
    assert (first.requeue, first.exclude, first.history.counted) == (True, (), 1)
    assert "too few nodes are left (n1 ended with 80" in first.why
    assert after(80, 80, nodes=3, gave_up=True).exclude == ("n1", "n2")
    assert after(80, gave_up=True).exclude == ("n1",)


def test_launchers_that_were_ended_for_lack_of_nodes_do_not_make_it_a_preemption() -> None:
    assert after(79, 201, gave_up=True).history.counted == 1


def test_lost_node_that_nobody_replaces_is_a_counted_requeue() -> None:
    decision = after(79, gave_up=True)
    assert (decision.requeue, decision.history.counted) == (True, 1)
    assert "lost without a word" in decision.why


def test_preemption_after_a_spare_has_taken_over_leaves_the_faulty_node_out() -> None:
    decision = after(79, 201, 79)
    assert (decision.requeue, decision.exclude, decision.history.counted) == (True, ("n2",), 0)


def test_killed_launchers_without_a_word_are_lost_nodes() -> None:
    decision = decide(Situation(137))
    assert decision.requeue
    assert "srun ended with 137: launchers were killed or nodes lost, or nothing was started" in decision.why


def test_srun_that_ends_with_0_for_a_lost_node_has_not_finished() -> None:
    decision = decide(Situation(0, step=60))
    assert (decision.requeue, decision.code) == (True, 1)
    assert "no launcher said how it ended, and srun ended with 0" in decision.why


def test_killed_launchers_that_advanced_are_not_without_progress() -> None:
    decision = decide(Situation(137, step=41, history=History(counted=3, step=40)))
    assert decision.requeue
    assert "launchers were killed or nodes lost, at step 41 or later: requeue 1 of 3" in decision.why


def test_requeues_without_progress_are_bounded() -> None:
    decision = after(1, 75, history=History(counted=3, cause="hang: x", step=7), step=7, cause="exit: y")
    assert (decision.requeue, decision.code) == (False, 75)
    assert "--max-requeues" in decision.why


def test_chain_without_memory_is_bounded_by_the_starts_of_the_job() -> None:
    failed = after(1, 1)
    assert without_memory(failed, 2, 3) == failed
    ended = without_memory(failed, 3, 3)
    assert (ended.requeue, ended.code) == (False, 1)
    assert "nothing can be remembered" in ended.why
    stopped = after(79, 79, asked=True)
    assert without_memory(stopped, 99, 3) == stopped, "those are free"
    assert without_memory(after(0, 0), 99, 3).code == 0


def test_job_that_fails_at_every_stop_and_can_not_remember_is_not_requeued_for_ever() -> None:
    failed = after(79, 79, asked=True, stop_failure="exception of rank 0: OSError: no space left")
    assert (failed.requeue, failed.counted) == (True, False), "with a memory it is free"
    assert without_memory(failed, 2, 3) == failed
    ended = without_memory(failed, 3, 3)
    assert (ended.requeue, ended.code) == (False, 1)
    assert "no space left" in ended.why


def test_last_line_of_a_failed_job_names_the_rank_its_error_and_where_to_read_on() -> None:
    culprit = "rank 3 on n2: ValueError: bad batch; reports and logs: runs/7/0"
    first = after(1, 1, cause="exception: ValueError", culprit=culprit)
    assert f"failed, or ended by a signal ({culprit}): requeue 1 of 3" in first.why
    second = after(1, 1, cause="exception: ValueError", culprit=culprit, history=first.history)
    assert f"({culprit}): the same failure as before" in second.why
    assert f"restarting can't help ({culprit}). It is not requeued" in after(77, 77, culprit=culprit).why
    assert culprit not in after(0, 0, culprit=culprit).why


def test_store_that_died_is_the_cause_and_not_the_nodes_that_missed_it() -> None:
    assert after(75, 75, broken="the store was ended by signal 9").why.startswith(
        "the store was ended by signal 9: requeue 1"
    )


def test_progress_begins_the_count_anew() -> None:
    decision = after(1, 1, history=History(counted=3, cause="exit: y", step=7), step=8, cause="exit: y")
    assert decision.requeue
    assert (decision.history.counted, decision.history.step) == (1, 8)


def test_same_failure_without_progress_ends_the_chain() -> None:
    decision = after(1, 1, history=History(counted=1, cause="exit: y", step=7), step=7, cause="exit: y")
    assert (decision.requeue, decision.code) == (False, 1)
    assert "no step beyond 7" in decision.why


def test_another_node_that_is_faulty_is_not_the_same_failure() -> None:
    first = after(1, 201, gave_up=True, cause="exit: ended with exit code #")
    second = after(1, 201, gave_up=True, cause="exit: ended with exit code #", history=first.history)
    assert second.requeue


def test_exit_code_of_a_chain_that_gives_up_is_never_0() -> None:
    decision = after(0, 0, finished=False, history=History(counted=3))
    assert (decision.requeue, decision.code) == (False, 1)


@pytest.mark.parametrize(
    ("codes", "nodes", "needed", "most", "is_settled"),
    [
        ((), 3, 2, 2, False),
        ((0, 0), 3, 2, 2, True),  # the third is a spare, or one that hangs and was replaced
        ((0,), 3, 2, 2, False),
        ((0, 0), 4, 2, 4, False),  # two may still write what they have
        ((0, 0, 0, 0), 4, 2, 4, True),  # and srun does not end
        ((1, 1), 3, 2, 2, True),
        ((77,), 3, 2, 2, False),
        ((201,), 3, 2, 2, False),
        ((201,), 2, 2, 2, True),
        ((0, 201), 3, 2, 2, False),
    ],
)
def test_hung_launcher_is_waited_for_only_while_it_matters(
    codes: tuple[int, ...], nodes: int, needed: int, most: int, is_settled: bool
) -> None:
    assert settled(ends(*codes), nodes, needed, most) is is_settled


@pytest.mark.parametrize(
    ("codes", "nodes", "needed", "few"),
    [
        ((), 2, 2, False),
        ((201,), 2, 2, True),
        ((201,), 3, 2, False),
        ((201, 76), 3, 2, True),
        ((79,), 2, 2, False),
        ((0,), 2, 2, False),
        ((201, 79), 3, 2, False),  # the others stop by themselves: they are not hurried
    ],
)
def test_too_few_nodes_are_left_only_when_nodes_left(
    codes: tuple[int, ...], nodes: int, needed: int, few: bool
) -> None:
    assert too_few(ends(*codes), nodes, needed) is few


def test_failure_that_was_got_over_long_ago_is_none_that_repeats_itself() -> None:
    """In between the job was requeued for its time limit, and went on."""
    first = after(1, 1, step=100, cause="exception: NCCL error")
    rested = after(79, 79, asked=True, step=5000, history=first.history)
    again = after(1, 1, step=-1, cause="exception: NCCL error", history=rested.history)
    assert (again.requeue, again.history) == (True, History(1, "exception: NCCL error", 5000))
    assert not after(1, 1, step=-1, cause="exception: NCCL error", history=again.history).requeue


def test_stop_that_failed_long_ago_is_none_that_repeats_itself() -> None:
    failed = {
        "asked": True,
        "cause": "exception: OSError",
        "stop_failure": "exception of rank 0: OSError: no space left",
    }
    first = after(79, 79, step=60, **failed)
    rested = after(79, 79, asked=True, step=5000, history=first.history)
    again = after(79, 79, step=5000, history=rested.history, **failed)
    assert again.failed_at_stop
