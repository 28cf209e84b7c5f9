"""The max-plus model gives the round times of the specification's table, and says where they come from."""

from itertools import pairwise

import pytest

from archipel.errors import ConfigError
from archipel.protocol import topology
from archipel.sim import rounds
from archipel.sim.rounds import Islands, adapted_steps, gossip_round, one_straggler

TABLE = {  # gossip specification, section 3
    (3, 0.1): {"diloco": 86.2, "fixed": 60.0, "adapted": 33.0, "none": 33.0},
    (3, 0.2): {"diloco": 58.1, "fixed": 45.0, "adapted": 33.0, "none": 33.0},
    (1, 0.1): {"diloco": 48.8, "fixed": 40.0, "adapted": 31.0, "none": 31.0},
    (1, 0.2): {"diloco": 39.4, "fixed": 35.0, "adapted": 31.0, "none": 31.0},
}


def test_table_of_round_times_is_met_within_two_percent():
    found = rounds.gasloc_rounds()["rows"]
    assert [(row["c"], row["r"]) for row in found] == list(TABLE)
    for row in found:
        wanted = TABLE[(row["c"], row["r"])]
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("c", "r", "peers", "steps"),
    [(3, 0.1, 1, 3), (3, 0.2, 1, 18), (1, 0.1, 1, 21), (1, 0.2, 1, 26), (3, 0.2, 2, 6), (3, 0.1, 2, 1)],
)
def test_adapted_steps_follow_the_rule_and_stay_at_least_one(c, r, peers, steps):
    assert adapted_steps(30, peers, c, r) == steps


def test_a_full_link_keeps_all_its_steps():
    assert adapted_steps(30, 2, 3, 1.0) == 30


def test_adapted_steps_do_not_lose_one_to_rounding():
    assert adapted_steps(30, 2, 5.5, 0.44) == 16  # 11·(1/0.44 − 1) = 14, a hair more in floating point


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_a_bandwidth_outside_its_range_is_refused_with_the_remedy(fraction):
    with pytest.raises(ConfigError, match="fastest link has 1"):
        adapted_steps(30, 1, 3, fraction)


def test_blocking_exchange_lets_the_slow_link_back_in():
    adapted = one_straggler(3, 0.1, adapted=True)
    assert gossip_round(adapted, exchange="blocking", rounds=1000) == pytest.approx(40.9, rel=0.02)


def test_fixed_steps_slow_everybody_down_through_random_pairs():
    last = rounds.timeline(one_straggler(3, 0.1, adapted=False), "one_peer", "non_blocking", 200, 1)[-1]
    assert min(last.start) > 0.95 * 200 * 60  # every worker, though one link of sixteen is slow


def test_two_peers_with_adapted_steps_keep_the_pace_of_two_transfers():
    adapted = one_straggler(3, 0.2, adapted=True, peers=2)
    assert gossip_round(adapted, scheme="two_peer") == pytest.approx(30 + 2 * 3, rel=0.01)


def test_only_the_slow_end_mixes_late_and_by_one_round():
    adapted = one_straggler(3, 0.1, adapted=True)
    history = rounds.timeline(adapted, "one_peer", "non_blocking", 50, 0)
    assert all(not any(progress.owed[1:]) for progress in history)
    assert history[-1].late == 50
    for before, after in pairwise(history[1:]):
        assert before.owed[0] <= after.start[0]


def test_nothing_is_late_without_a_straggler():
    even = Islands((30,) * 8, (1.0,) * 8, 3)
    assert rounds.timeline(even, "one_peer", "non_blocking", 50, 0)[-1].late == 0


def test_equally_slow_links_cost_their_transfer_and_no_more():
    assert gossip_round(Islands((30,) * 8, (0.5,) * 8, 3)) == pytest.approx(36)


def test_two_rounds_by_hand():
    # Worker 0 runs 10 steps, worker 1 runs 20; a transfer takes 4. They meet every round.
    history = rounds.timeline(Islands((10, 20), (1.0, 1.0), 4), "one_peer", "non_blocking", 2, 0)
    assert history[1].start == [24, 20]  # 0 waits for the model of 1; 1 has had that of 0 since 14
    assert history[2].start == [44, 40]


def test_a_lone_worker_only_computes():
    assert gossip_round(Islands((7,), (1.0,), 3), rounds=10) == 7


def test_odd_worker_that_idles_does_not_wait():
    history = rounds.timeline(Islands((5, 5, 5), (1.0,) * 3, 2), "one_peer", "non_blocking", 1, 0)
    assert sorted(history[1].start) == [5, 7, 7]


def test_the_slow_end_is_never_more_than_one_round_late():
    # Transfers take 20 at worker 0. The first model reaches it at 100 + 20, while round 1 would end at 44.
    history = rounds.timeline(Islands((2, 100), (0.1, 1.0), 2), "one_peer", "non_blocking", 2, 0)
    assert [progress.start[0] for progress in history] == [0, 22, 120]


def test_late_models_queue_for_the_slow_downlink():
    # Worker 0 takes 30 a transfer. Its first partner is ready at 10: arrival at 40. The second is ready at
    # 23 and has to wait for the link until then: arrival at 70.
    view = ("000000", "000001", "000002", "000003")

    def partner(seed, round_):
        return topology.row_of(view[0], "one_peer", view, topology.RoundKey(seed, 0, round_)).partners

    seed = next(seed for seed in range(100) if partner(seed, 0) != partner(seed, 1))
    history = rounds.timeline(
        Islands((1, 10, 10, 10), (0.1, 1.0, 1.0, 1.0), 3), "one_peer", "non_blocking", 2, seed
    )
    assert [progress.owed[0] for progress in history] == [0, 40, 70]
