"""Everybody derives the same doubly stochastic matrix from the seed, the epoch, the round and the view."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest
import torch

from archipel.protocol import topology
from archipel.protocol.topology import RoundKey

torch.set_num_threads(1)

# Golden: peers of different versions of this program must still meet each other.
FROZEN_ORDER = [0, 6, 2, 4, 5, 3, 7, 1]
FROZEN_DIGEST = "a32d46e0a12bed5e"


def view_of(n):
    return tuple(f"peer-{k:03d}" for k in range(n))


def expected_matrix(scheme, n):
    """The mean of W over all seatings of n workers, each once."""
    total = torch.zeros(n, n, dtype=torch.float64)
    seatings = list(itertools.permutations(range(n))) if n < 7 else distinct_seatings(scheme, n)
    for seats in seatings:
        total += torch.tensor(
            topology.matrix(topology.seated_rows(scheme, view_of(n), seats)), dtype=torch.float64
        )
    return total / len(seatings)


def distinct_seatings(scheme, n):
    """One seating for each matching, or for each ring (the first seat held fast)."""
    if scheme == "two_peer":
        return [(0, *rest) for rest in itertools.permutations(range(1, n))]
    return list(matchings(tuple(range(n))))


def matchings(left):
    """All ways to cut workers into pairs; of an odd number, one is last."""
    if len(left) < 2:
        yield left
        return
    if len(left) % 2:
        for idle in left:
            yield from ((*m, idle) for m in matchings(tuple(x for x in left if x != idle)))
        return
    for other in left[1:]:
        yield from ((left[0], other, *m) for m in matchings(tuple(x for x in left[1:] if x != other)))


def second_eigenvalue(matrix):
    return torch.linalg.eigvalsh(matrix)[-2].item()


PAIRS = [("one_peer", n, e) for n, e in ((2, 0), (4, 1 / 3), (6, 2 / 5), (8, 3 / 7))]
ODD_PAIRS = [("one_peer", n, 1 / 2) for n in (3, 5, 7)]
RINGS = [("two_peer", n, e) for n, e in ((3, 0), (4, 1 / 9), (5, 1 / 6), (6, 1 / 5), (7, 2 / 9))]


@pytest.mark.parametrize(("scheme", "n", "exact"), PAIRS + ODD_PAIRS + RINGS)
def test_second_eigenvalue_of_the_expected_matrix_is_exact(scheme, n, exact):
    assert second_eigenvalue(expected_matrix(scheme, n)) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("scheme", topology.SCHEMES)
@pytest.mark.parametrize("alpha", [1.0, 0.55])
def test_rows_and_columns_sum_to_one_and_no_entry_is_negative(scheme, alpha):
    for n, round_ in itertools.product([1, 2, 3, 4, 5, 8, 11, 16], range(5)):
        w = torch.tensor(
            topology.matrix(topology.rows(scheme, view_of(n), RoundKey(3, 1, round_), alpha=alpha)),
            dtype=torch.float64,
        )
        assert (w >= 0).all()
        torch.testing.assert_close(w.sum(0), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-15)
        torch.testing.assert_close(w.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-15)
        models = torch.arange(n, dtype=torch.float64)
        assert (w @ models).mean().item() == pytest.approx(models.mean().item(), abs=1e-13)


@pytest.mark.parametrize("scheme", topology.SCHEMES)
def test_each_worker_alone_derives_the_row_that_everybody_sees(scheme):
    for n in (1, 2, 5, 8):
        key = RoundKey(seed=9, epoch=2, round=4)
        together = topology.rows(scheme, view_of(n), key, alpha=0.8)
        assert together == tuple(
            topology.row_of(worker, scheme, view_of(n), key, alpha=0.8) for worker in view_of(n)
        )


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_pairs_are_disjoint_and_only_one_of_an_odd_number_idles(n):
    for round_ in range(50):
        rows = topology.rows("one_peer", view_of(n), RoundKey(1, 0, round_))
        met = {row.worker: row.partners for row in rows}
        assert sum(not partners for partners in met.values()) == n % 2
        assert all(met[partner] == (worker,) for worker, partners in met.items() for partner in partners)
        assert all((row.own, row.weights) in ((0.5, (0.5,)), (1.0, ())) for row in rows)


def test_everybody_idles_in_turn_when_the_number_is_odd():
    idle = Counter(
        row.worker
        for round_ in range(5000)
        for row in topology.rows("one_peer", view_of(5), RoundKey(0, 0, round_))
        if not row.partners
    )
    assert min(idle.values()) > 900 and len(idle) == 5  # 1000 each, standard deviation 28


def test_every_pair_is_equally_likely():
    met = Counter(
        (row.worker, row.partners[0])
        for round_ in range(7000)
        for row in topology.rows("one_peer", view_of(8), RoundKey(5, 0, round_))
    )
    assert len(met) == 56
    assert 850 < min(met.values()) <= max(met.values()) < 1150  # 1000 each, standard deviation 29


def test_every_order_of_four_is_equally_likely():
    seen = Counter(tuple(topology.permutation(4, RoundKey(0, e, r))) for e in range(60) for r in range(200))
    chi_square = sum((count - 500) ** 2 / 500 for count in seen.values())
    assert len(seen) == 24
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded once in a thousand


def test_three_workers_form_a_complete_ring_and_two_a_pair():
    three = topology.matrix(topology.rows("two_peer", view_of(3), RoundKey(0, 0, 0)))
    two = topology.matrix(topology.rows("two_peer", view_of(2), RoundKey(0, 0, 0)))
    assert three == [[pytest.approx(1 / 3)] * 3] * 3
    assert two == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("scheme", topology.SCHEMES)
def test_one_worker_is_alone(scheme):
    assert topology.rows(scheme, ("only",), RoundKey(0, 0, 3)) == (topology.Row("only", 1.0),)


def test_static_ring_meets_the_neighbours_in_view_order():
    row = topology.row_of("peer-000", "static_ring", view_of(5), RoundKey(0, 0, 7))
    assert row.partners == row.listeners == ("peer-001", "peer-004")


def test_one_peer_exponential_reaches_consensus_in_log_n_rounds():
    product = torch.eye(8, dtype=torch.float64)
    for round_ in range(3):
        rows = topology.rows("one_peer_exponential", view_of(8), RoundKey(0, 0, round_))
        product = torch.tensor(topology.matrix(rows), dtype=torch.float64) @ product
    torch.testing.assert_close(product, torch.full((8, 8), 1 / 8, dtype=torch.float64))


@pytest.mark.parametrize("scheme", topology.SCHEMES)
def test_whoever_is_heard_knows_who_listens(scheme):
    rows = topology.rows(scheme, view_of(6), RoundKey(0, 0, 1))
    heard = {(row.worker, partner) for row in rows for partner in row.partners}
    told = {(listener, row.worker) for row in rows for listener in row.listeners}
    assert heard == told


def test_static_exponential_hears_at_powers_of_two():
    row = topology.row_of("peer-000", "static_exponential", view_of(6), RoundKey(0, 0, 0))
    assert row.partners == ("peer-001", "peer-002", "peer-004")
    assert row.listeners == ("peer-002", "peer-004", "peer-005")
    assert row.own == pytest.approx(1 / 4)


@pytest.mark.parametrize("changed", [RoundKey(2, 0, 0), RoundKey(1, 1, 0), RoundKey(1, 0, 1)])
def test_seed_epoch_and_round_each_change_the_draw(changed):
    assert topology.permutation(50, changed) != topology.permutation(50, RoundKey(1, 0, 0))


def test_the_generator_is_the_one_written_down():
    # SplitMix64 seeded with 0 gives these words (reference implementation of Vigna, prng.di.unimi.it).
    words = [topology.mix64((k + 1) * topology.GOLDEN & topology.MASK) for k in range(3)]
    assert words == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_draw_never_changes_between_versions():
    assert topology.permutation(8, RoundKey(seed=42, epoch=3, round=7)) == FROZEN_ORDER
    assert topology.view_digest(("a", "b")) == FROZEN_DIGEST


def test_another_process_derives_the_same_draw():
    code = (
        "from archipel.protocol.topology import *; print(permutation(8, RoundKey(42, 3, 7)), "
        "view_digest(('a', 'b')))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.split("\n")[0] == f"{FROZEN_ORDER} {FROZEN_DIGEST}"


def test_digest_tells_views_apart_even_when_names_run_together():
    views = [("a",), ("a", "b"), ("ab",), ("a", "bc"), ("ab", "c"), ("a", "é")]
    assert len({topology.view_digest(view) for view in views}) == len(views)


def test_seeds_beyond_64_bits_and_below_zero_are_taken_modulo():
    assert topology.permutation(9, RoundKey(-1, 0, 0)) == topology.permutation(9, RoundKey(2**64 - 1, 0, 0))


@pytest.mark.parametrize("view", [("b", "a"), ("a", "a"), ()])
def test_a_view_that_is_not_sorted_and_unique_is_refused(view):
    with pytest.raises(AssertionError):
        topology.rows("one_peer", view, RoundKey(0, 0, 0))


@pytest.mark.parametrize("scheme", topology.SCHEMES)
def test_partners_are_named_in_the_same_order_everywhere(scheme):
    for round_ in range(20):
        for row in topology.rows(scheme, view_of(7), RoundKey(1, 0, round_)):
            assert list(row.partners) == sorted(row.partners)
            assert list(row.listeners) == sorted(row.listeners)
