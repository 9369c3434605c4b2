"""What is concluded from heartbeat messages alone: who is silent, failed, stuck or slow."""

from megatron_zpp.supervision.heartbeat_messages import HeartbeatMessage, LivenessMonitor


def beat(rank: int, count: int = 1, **changes: object) -> HeartbeatMessage:
    values = {"doing": "step 7", "marks": 10, "seconds": 0.0, "patient": False, **changes}
    return HeartbeatMessage(rank=rank, host=f"host{rank}", count=count, **values)


def test_the_liveness_monitor_names_silent_failed_and_stuck_ranks() -> None:
    judge = LivenessMonitor(timeout=60, patience=3, news=0)
    judge.see([beat(0), beat(1), None], 100)
    judge.see([beat(0, 2), beat(1), None], 160)
    assert judge.lost([beat(0, 2), beat(1), None]) is None
    judge.see([beat(0, 3), beat(1), None], 161)
    assert (
        judge.lost([beat(0, 3), beat(1), None])
        == "rank 1 [host1] has been silent for 61 s; last seen: step 7"
    )
    judge.see([beat(0, 4), beat(1, 2), None], 162)
    everyone = [beat(0, 4), beat(1, 2, left=True), None]
    assert judge.lost(everyone) == "rank 2 has been silent for 62 s; last seen: starting"
    judge.see([beat(0, 5), beat(1, 2), beat(2)], 166)
    assert judge.lost([beat(0, 5), beat(1, 2), beat(2)]) is None
    assert "rank 1 [host1] has been silent for 4 s" in judge.lost(
        [beat(0, 5, asks=True), beat(1, 2), beat(2)]
    )
    assert judge.lost([beat(0, 5), beat(1, 2)]) is None
    assert "rank 1 [host1] has been silent for 4 s" in judge.lost([beat(0, 5), beat(1, 2)], asked=True)
    assert judge.lost([beat(0), beat(1), beat(2, failed="no memory")]) == "rank 2 [host2] failed: no memory"


def test_who_begins_to_ask_waits_for_news_of_an_end_before_a_long_silence_counts() -> None:
    """A process killed while it waited for a disk has been silent for long when its connections close."""
    judge = LivenessMonitor(timeout=60, patience=3, news=2)
    judge.see([beat(0), beat(1)], 100)
    asking = [beat(0, 2, asks=True), beat(1)]
    for now, known in ((106, False), (107.9, False), (108, True)):
        judge.see(asking, now)
        assert bool(judge.lost(asking)) == known
    judge.see([beat(0, 3), beat(1)], 109)  # who asked has been told: the next one to ask waits again
    assert judge.lost([beat(0, 3), beat(1)]) is None
    judge.see(asking, 111)
    assert judge.lost(asking) is None


def test_the_rank_with_the_fewest_marks_is_stuck_and_not_those_that_wait_for_it() -> None:
    judge = LivenessMonitor(timeout=60, patience=3, news=0)
    waiting = [beat(0, seconds=61), beat(2, seconds=61)]
    assert "rank 1 [host1] stuck for 61 s" in judge.stuck([*waiting, beat(1, marks=9, seconds=61)])
    assert judge.stuck([*waiting, beat(1, marks=9, seconds=5)]) is None  # slow, not stuck
    assert judge.stuck([*waiting, beat(1, marks=9, seconds=61, patient=True)]) is None  # saves, say
    assert "rank 0 [host0] and rank 2 [host2] stuck" in judge.stuck([*waiting, beat(1, marks=9, left=True)])
    assert judge.stuck([None]) is None
    joins = {"limit": 100.0, "doing": "joins"}
    assert judge.stuck([beat(0, seconds=61, **joins)]) is None
    assert "rank 0 [host0] stuck for 101 s" in judge.stuck([beat(0, seconds=101, **joins)])


def test_waiting_ranks_are_told_for_which_rank_they_wait() -> None:
    judge = LivenessMonitor(timeout=60, patience=3, news=0)
    joins = {"limit": 100.0, "doing": "joins", "seconds": 12}
    everyone = [beat(0, **joins), beat(1, **joins)]
    judge.see(everyone, 100)
    assert judge.slow(everyone, 10) == "rank 0 [host0] and rank 1 [host1]: joins for 12 s"
    assert judge.slow(everyone, 15) is None
    judge.see([beat(0, 2, **joins), beat(1, **joins)], 104)  # the second is silent
    assert judge.slow([beat(0, 2, **joins), beat(1, **joins)], 10) == "rank 1 [host1]: joins for 16 s"
    assert judge.slow([beat(0, 2, **joins), beat(1, marks=9)], 10) is None  # has no limit
