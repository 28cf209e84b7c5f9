"""The stable region comes from theory: the specification's limits, and what the mixing functions do."""

import itertools
import math
import subprocess
import sys
from typing import get_args

import pytest
import torch

from archipel.numerics import mixing, stability
from archipel.protocol import topology

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("form", "peers", "limit"),
    [
        ("local", "one_peer", 0.707),
        ("local", "two_peer", 0.795),
        ("mixed", "one_peer", 0.781),
        ("postmix", "one_peer", 0.781),
        ("mixed", "two_peer", 1.0),
        ("postmix", "two_peer", 1.0),
        ("drift", "one_peer", 1.0),
        ("drift", "two_peer", 1.0),
    ],
)
def test_largest_stable_momentum_is_the_table_of_section_4(form, peers, limit):
    assert stability.stable(form, peers, 0.5).momentum_limit == pytest.approx(limit, abs=5e-4)


def test_limits_of_pairs_have_closed_forms():
    assert stability.stable("local", "one_peer", 0.5).momentum_limit == pytest.approx(
        math.sqrt(0.5), abs=1e-7
    )
    mixed = stability.stable("mixed", "one_peer", 0.5).momentum_limit
    assert mixed == pytest.approx((math.sqrt(17) - 1) / 4, abs=1e-7)


def test_damping_of_mixed_pairs_at_high_momentum():
    verdict = stability.stable("mixed", "one_peer", 0.9)
    assert verdict.alpha_limit == pytest.approx(0.84, rel=0.01)
    assert 0.5 <= verdict.safe_alpha <= 0.6
    assert stability.growth("mixed", "one_peer", 0.9, alpha=0.84) < 1
    assert stability.growth("mixed", "one_peer", 0.9, alpha=0.85) > 1


def test_local_pairs_grow_by_nineteen_percent_and_the_verdict_says_what_to_do():
    verdict = stability.stable("local", "one_peer", 0.9, n=16)
    assert verdict.growth == pytest.approx(1.19, abs=0.005)
    assert not verdict.stable
    assert "momentum=0.65 (limit 0.724)" in str(verdict) and "form=drift" in str(verdict)


@pytest.mark.parametrize("peers", topology.SCHEMES)
@pytest.mark.parametrize("form", stability.FORMS)
def test_what_is_called_safe_is_stable(form, peers):
    verdict = stability.stable(form, peers, 0.95, n=16)
    assert stability.growth(form, peers, verdict.safe_momentum, n=16) < 1
    if verdict.safe_alpha:
        assert stability.growth(form, peers, 0.95, alpha=verdict.safe_alpha, n=16) < 1
    assert verdict.stable == ("diverges" not in str(verdict))


@pytest.mark.parametrize("n", [16, 32, 64])
def test_one_peer_exponential_allows_little_momentum(n):
    assert 0.50 < stability.stable("mixed", "one_peer_exponential", 0.9, n=n).momentum_limit < 0.55


@pytest.mark.parametrize(("peers", "gamma"), [("one_peer", 0.5), ("two_peer", 0.7)])
def test_the_defaults_are_stable_at_any_size(peers, gamma):
    assert all(stability.stable("mixed", peers, gamma, n=n).stable for n in (1, 2, 3, 4, 5, 8, 16, math.inf))


def test_without_momentum_the_factor_is_the_second_eigenvalue():
    for n in (2, 3, 6, 7, 16):
        for peers in ("one_peer", "two_peer"):
            rate = stability.growth("mixed", peers, 0.0, n=n)
            assert rate == pytest.approx(stability.second_eigenvalue(peers, n), abs=1e-9)


def test_static_ring_has_the_gap_of_section_4():
    n = 100
    gap = 1 - math.sqrt(stability.growth("mixed", "static_ring", 0.0, n=n))
    assert gap == pytest.approx(4 * math.pi**2 / (3 * n**2), rel=0.01)


def test_dropped_pairs_contract_as_if_seldom_met():
    rho = stability.second_eigenvalue("one_peer", 8)
    dropped = stability.growth("mixed", "one_peer", 0.0, n=8, drop=0.3)
    assert dropped == pytest.approx(1 - (1 - 0.3) * (1 - rho), abs=1e-9)


def matrices(scheme, n, alpha=1.0):
    view = tuple(f"{k}" for k in range(n))
    for seats in itertools.permutations(range(n)):
        yield torch.tensor(
            topology.matrix(topology.seated_rows(scheme, view, seats, alpha=alpha)), dtype=torch.float64
        )


@pytest.mark.parametrize("scheme", ["one_peer", "two_peer"])
@pytest.mark.parametrize("form", ["mixed", "local", "postmix"])
def test_second_moments_follow_the_recursion_exactly(form, scheme):
    # One round of the real functions from any state, averaged over all seatings of five workers.
    generator = torch.Generator().manual_seed(3)
    x, p = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    x, p = x - x.mean(0), p - p.mean(0)
    state = torch.stack([(x * x).sum(), (x * p).sum(), (p * p).sum()])
    total, count = torch.zeros(3, dtype=torch.float64), 0
    for w in matrices(scheme, 5, alpha=0.8):
        new = one_round(form, w, x, p, gamma=0.7)
        total += torch.stack([(new * new).sum(), (new * x).sum(), (x * x).sum()])
        count += 1
    lam, q = stability.moments(scheme, 5, alpha=0.8)
    theory = torch.tensor(stability.second_moments(form, 0.7, lam, q), dtype=torch.float64) @ state
    torch.testing.assert_close(total / count, theory, rtol=1e-12, atol=1e-12)


def one_round(form, w, x, p, gamma):
    """All workers at once, without drifts: a row a worker. Of postmix, x and p are u and u_prev."""
    if form == "postmix":
        made = mixing.Offer("postmix", gamma, x, x, p)  # as if x had just been mixed
        theta, _ = mixing.settle(made, x)
        return w @ mixing.offer("postmix", theta, theta, x, lr=1.0, momentum=gamma).sent
    made = mixing.offer(form, x, x, p, lr=1.0, momentum=gamma)
    return mixing.settle(made, w @ made.sent)[0]


@pytest.mark.parametrize("form", ["mixed", "local", "postmix"])
def test_spread_is_the_long_run_of_noisy_rounds(form):
    x = p = torch.zeros(20_000, 4, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    pairings = torch.tensor([[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
    for _ in range(40):
        drift = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        drift = (drift - drift.mean(1, keepdim=True)) * math.sqrt(4 / 3)  # E|drift|² = 1 a worker
        met = pairings[torch.randint(3, (len(x),), generator=generator)].unsqueeze(-1)
        if form == "postmix":
            theta, _ = mixing.settle(mixing.Offer("postmix", 0.5, x, x, p), x)
            made = mixing.offer("postmix", theta, theta + drift, x, lr=1.0, momentum=0.5)
            x, p = mixing.mix(made.sent, [made.sent.gather(1, met)], [0.5]), x
            continue
        made = mixing.offer(form, x, x + drift, p, lr=1.0, momentum=0.5)
        x, p = mixing.settle(made, mixing.mix(made.sent, [made.sent.gather(1, met)], [0.5]))
    assert x.square().mean().item() == pytest.approx(stability.spread(form, "one_peer", 0.5, n=4), rel=0.05)


@pytest.mark.parametrize("scheme", ["one_peer_exponential", "static_exponential", "static_ring", "complete"])
@pytest.mark.parametrize("form", ["mixed", "local"])
def test_growth_on_fixed_graphs_is_that_of_the_whole_recursion(form, scheme):
    n, gamma = 6, 0.8
    view, period = tuple(f"{k}" for k in range(n)), 3
    whole = torch.eye(2 * n, dtype=torch.float64)
    for round_ in range(period):
        rows = topology.rows(scheme, view, topology.RoundKey(0, 0, round_))
        w = torch.tensor(topology.matrix(rows), dtype=torch.float64) - 1 / n  # less the mean
        eye, zero = torch.eye(n, dtype=torch.float64) - 1 / n, torch.zeros(n, n, dtype=torch.float64)
        on_x = w + gamma * eye if form == "local" else (1 + gamma) * w
        on_p = -gamma * eye if form == "local" else -gamma * w
        whole = torch.cat([torch.cat([on_x, on_p], 1), torch.cat([eye, zero], 1)]) @ whole
    radius = torch.linalg.eigvals(whole).abs().max().item()
    assert stability.growth(form, scheme, gamma, n=n) == pytest.approx(radius ** (2 / period), abs=1e-6)


def test_theory_covers_every_scheme_that_is_drawn():
    assert get_args(stability.Graph) == topology.SCHEMES


def test_a_configuration_is_checked_without_torch():
    code = "import sys, archipel.numerics.stability; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spectral_radius_of_rotations_zero_and_defective_matrices():
    assert stability.spectral_radius([[0, -2], [2, 0]]) == pytest.approx(2)
    assert stability.spectral_radius([[0, 1], [0, 0]]) == 0
    assert stability.spectral_radius([[0.5, 1], [0, 0.5]]) == pytest.approx(0.5, abs=1e-9)


def test_rings_whose_links_fail_one_by_one_contract_as_stated():
    n, drop = 5, 0.3
    traces, squares = 0.0, 0.0
    for kept in itertools.product((0, 1), repeat=n):
        chance = math.prod(1 - drop if k else drop for k in kept)
        w = torch.eye(n, dtype=torch.float64)
        for i, k in enumerate(kept):
            difference = torch.zeros(n, dtype=torch.float64)
            difference[i], difference[(i + 1) % n] = 1, -1
            w -= k / 3 * torch.outer(difference, difference)
        traces += chance * w.trace().item()
        squares += chance * w.square().sum().item()
    # Averaged over all rings, E[W] and E[W²] act on differences as one number: what is left of their traces.
    expected = ((traces - 1) / (n - 1), (squares - 1) / (n - 1))
    assert stability.moments("two_peer", n, drop=drop) == pytest.approx(expected)
