"""Gossip rounds: DiLoCo on the complete graph, an exact mean, contraction and divergence as in theory."""

import functools
import hashlib
import itertools
import math

import pytest
import torch

from archipel.numerics import mixing, outer, stability
from archipel.protocol import topology

torch.set_num_threads(1)

ROUNDS, STEPS, DIM, BATCH = 60, 30, 12, 8
LR, MOMENTUM = 0.7, 0.9


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def view_of(n):
    return tuple(f"peer-{k:03d}" for k in range(n))


def train(n, dtype, next_anchors):
    """Each of n workers fits a logistic model to data of its own with AdamW, 30 steps a round.

    next_anchors: from (anchors, reached), both (n, DIM), to the next anchors. Returns the last ones. Rows are
    workers; AdamW works by element, so each row is an optimizer of its own, kept across rounds.
    """
    data = torch.randn(n, 64, DIM, generator=generator(1), dtype=torch.float64)
    truth = torch.randn(n, DIM, 1, generator=generator(2), dtype=torch.float64) * 0.3 + 1
    labels = (torch.bmm(data, truth) > 0).to(dtype)
    data = data.to(dtype)
    weights = torch.nn.Parameter(torch.full((n, DIM), 0.1, dtype=dtype))
    optimizer = torch.optim.AdamW([weights], lr=0.01, foreach=False)
    for round_ in range(ROUNDS):
        anchors = weights.detach().clone()
        for step in range(STEPS):
            first = (round_ * STEPS + step) * BATCH % 64
            x, y = data[:, first : first + BATCH], labels[:, first : first + BATCH]
            error = torch.sigmoid(torch.bmm(x, weights.detach().unsqueeze(-1))) - y
            weights.grad = torch.bmm(x.transpose(1, 2), error).squeeze(-1) / BATCH
            optimizer.step()
        with torch.no_grad():
            weights.copy_(next_anchors(anchors, weights.detach().clone()))
    return weights.detach()


@functools.cache
def diloco(n, dtype, momentum=MOMENTUM):
    """The last weights of DiLoCo, by torch's own optimizer."""
    theta = torch.nn.Parameter(torch.full((DIM,), 0.1, dtype=dtype))
    optimizer = torch.optim.SGD([theta], lr=LR, momentum=momentum, nesterov=momentum > 0)

    def next_anchors(anchors, reached):
        theta.grad = (anchors - reached).mean(0)
        optimizer.step()
        return theta.detach().expand(n, DIM)

    return train(n, dtype, next_anchors)[0]


def gossip(form, scheme, n, dtype, momentum=MOMENTUM):
    """The last weights of n workers that gossip, a worker at a time."""
    remembered = [mixing.start(form, torch.full((DIM,), 0.1, dtype=dtype)) for _ in range(n)]
    round_ = itertools.count()

    def next_anchors(anchors, reached):
        made = [
            mixing.offer(form, anchors[k], reached[k], remembered[k], lr=LR, momentum=momentum)
            for k in range(n)
        ]
        thetas = []
        for k, row in enumerate(topology.rows(scheme, view_of(n), topology.RoundKey(0, 0, next(round_)))):
            received = [made[view_of(n).index(partner)].sent for partner in row.partners]
            theta, remembered[k] = mixing.settle(made[k], mixing.mix(made[k].sent, received, row.weights))
            thetas.append(theta)
        return torch.stack(thetas)

    return train(n, dtype, next_anchors)


def deviation(form, scheme, n, dtype, momentum=MOMENTUM):
    """The largest difference of any worker from DiLoCo."""
    return (gossip(form, scheme, n, dtype, momentum) - diloco(n, dtype, momentum)).abs().max().item()


@pytest.mark.parametrize("form", ["mixed", "postmix", "drift"])
def test_complete_graph_is_diloco_in_double_precision(form):
    assert deviation(form, "complete", 8, torch.float64) < 1e-12


@pytest.mark.parametrize("form", ["mixed", "postmix", "drift"])
def test_complete_graph_is_diloco_in_single_precision(form):
    assert deviation(form, "complete", 8, torch.float32) < 1e-5


@pytest.mark.parametrize(("scheme", "n"), [("one_peer", 2), ("two_peer", 3)])
def test_two_in_pairs_and_three_in_rings_are_diloco(scheme, n):
    assert deviation("mixed", scheme, n, torch.float64) < 1e-12
    assert deviation("postmix", scheme, n, torch.float64) < 1e-12


def test_local_is_diloco_without_momentum_only():
    assert deviation("local", "complete", 8, torch.float64) > 1e-3
    assert deviation("local", "complete", 8, torch.float64, momentum=0.0) < 1e-12


@pytest.mark.parametrize("form", stability.FORMS)
def test_a_worker_alone_takes_the_outer_nesterov_step(form):
    theta, velocity = torch.randn(50, generator=generator()), outer.init(50)
    alone, remembered = theta, mixing.start(form, theta)
    for seed in range(1, 20):
        drift = torch.randn(50, generator=generator(seed))
        theta, velocity = outer.update(theta, velocity, -drift, lr=0.7, mu=0.5)
        made = mixing.offer(form, alone, alone + drift, remembered, lr=0.7, momentum=0.5)
        alone, remembered = mixing.settle(made, mixing.mix(made.sent, [], []))
    torch.testing.assert_close(alone, theta, rtol=1e-5, atol=1e-5)


def test_one_round_of_each_form_by_hand():
    # θ = 1, g = 2, η = 0.5: y = 2. The last y (or u) was 0, the last v was 4; γ = 0.5. The partner sends 10.
    expected = {
        "mixed": (3.0, 6.5, 2.0),
        "local": (2.0, 7.0, 2.0),
        "postmix": (2.0, 9.0, 6.0),
        "drift": (3.0, 6.5, 4.0),
    }
    for form, (sent, theta, remembered) in expected.items():
        previous = torch.tensor([4.0 if form == "drift" else 0.0])
        made = mixing.offer(form, torch.tensor([1.0]), torch.tensor([3.0]), previous, lr=0.5, momentum=0.5)
        new, kept = mixing.settle(made, mixing.mix(made.sent, [torch.tensor([10.0])], [0.5]))
        assert (made.sent.item(), new.item(), kept.item()) == (sent, theta, remembered), form


def test_both_partners_of_a_pair_end_equal_to_the_bit():
    a, b = (torch.randn(100_000, generator=generator(seed)) * 10.0**seed for seed in (0, 3))
    made = [mixing.offer("mixed", x, x * 1.01, x * 0.9, lr=0.7, momentum=0.5) for x in (a, b)]
    at_a = mixing.settle(made[0], mixing.mix(made[0].sent, [made[1].sent], [0.5]))[0]
    at_b = mixing.settle(made[1], mixing.mix(made[1].sent, [made[0].sent], [0.5]))[0]
    digests = {hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in (at_a, at_b)}
    assert len(digests) == 1


def test_the_mean_is_kept_when_what_travels_is_coarse():
    z = [torch.randn(1000, generator=generator(seed), dtype=torch.float64) for seed in range(3)]
    sent = [x.to(torch.bfloat16).double() for x in z]
    rows = topology.rows("two_peer", view_of(3), topology.RoundKey(0, 0, 0), alpha=0.7)
    mixed = []
    for k, row in enumerate(rows):
        received = [sent[view_of(3).index(partner)] for partner in row.partners]
        mixed.append(mixing.mix(z[k], received, row.weights, sent=sent[k]))
    torch.testing.assert_close(sum(mixed), sum(z), rtol=0, atol=1e-14)
    assert (mixed[0] - z[0]).abs().max() > 0.1


def test_a_change_and_its_counterpart_are_exact_opposites():
    a, b = (torch.randn(1000, generator=generator(seed)) for seed in (1, 2))
    assert torch.equal(mixing.change(b, 0.3, sent=a), -mixing.change(a, 0.3, sent=b))


def test_a_change_applied_on_one_side_only_moves_the_mean_by_its_share():
    z = [torch.randn(64, generator=generator(seed), dtype=torch.float64) for seed in range(6)]
    after = [mixing.mix(z[0], [z[1]], [0.5]), *z[1:]]
    moved = sum(after) / 6 - sum(z) / 6
    torch.testing.assert_close(moved, (z[1] - z[0]) / (2 * 6), rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", stability.FORMS)
@pytest.mark.parametrize(("late", "rounds", "atol"), [(0, 5, 1e-12), (1, 400, 1e-6), (3, 400, 1e-6)])
def test_a_late_change_leads_the_mean_where_it_would_be_in_time(form, late, rounds, atol):
    in_time = two_workers(form, late=None, rounds=rounds)
    delayed = two_workers(form, late=late, rounds=rounds)
    for expected, found in zip(in_time, delayed, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("form", stability.FORMS)
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_one_who_is_late_in_every_round_stays_with_the_others(form, late):
    """Rings of six; the first worker's models are always late. No drifts: the workers must meet."""
    momentum, n = 0.7, 6
    theta = torch.randn(n, 20, generator=generator(3), dtype=torch.float64)
    kept, owed, pending = mixing.start(form, theta), torch.zeros(20, dtype=torch.float64), []
    seats = generator(4)
    for round_ in range(400):
        made = mixing.offer(form, theta, theta, kept, lr=0.7, momentum=momentum)
        order = torch.randperm(n, generator=seats)
        place = order.argsort()
        others = [made.sent[order[(place + step) % n]] for step in (1, -1)]
        mixed = mixing.mix(made.sent, others, [1 / 3, 1 / 3])
        pending.append((round_, (mixed - made.sent)[0].clone()))
        mixed[0] = made.sent[0]
        theta, kept = mixing.settle(made, mixed)
        share = mixing.owed_share(form, momentum)
        theta[0] += share * owed
        kept[0] += 0.0 if form == "drift" else share * owed
        owed *= 1 - share
        while pending and pending[0][0] <= round_ - late:
            factors = mixing.late(form, momentum, rounds=late)
            _, change = pending.pop(0)
            theta[0] += factors.on_weights * change
            kept[0] += factors.on_remembered * change
            owed += factors.owed * change
    assert mixing.consensus_error(list(theta)).mean_norm < 1e-3, mixing.consensus_error(list(theta))


def two_workers(form, late, rounds):
    """The means of what two workers hold and remember after so many rounds; in the first, worker 1 may mix
    late.

    late: rounds it has settled since when the change reaches it; None: in time. There are drifts in 5 rounds.
    """
    theta = [torch.randn(20, generator=generator(seed), dtype=torch.float64) for seed in (0, 1)]
    kept = [mixing.start(form, x) for x in theta]
    pending, owed = None, torch.zeros(20, dtype=torch.float64)
    for round_ in range(rounds):
        made = []
        for k in (0, 1):
            drift = torch.randn(20, generator=generator(10 * round_ + k + 2), dtype=torch.float64)
            drift *= round_ < 5
            made.append(mixing.offer(form, theta[k], theta[k] + drift, kept[k], lr=0.7, momentum=0.6))
        alone = round_ > 0
        for k in (0, 1):
            other = made[1 - k].sent
            mixed = made[k].sent if alone else mixing.mix(made[k].sent, [other], [0.5])
            if k == 1 and not alone and late is not None:
                mixed, pending = made[k].sent, mixing.change(other, 0.5, sent=made[k].sent)
            theta[k], kept[k] = mixing.settle(made[k], mixed)
        share = mixing.owed_share(form, 0.6)
        theta[1] = theta[1] + share * owed
        kept[1] = kept[1] if form == "drift" else kept[1] + share * owed
        owed = (1 - share) * owed
        if pending is not None and round_ == late:
            factors = mixing.late(form, 0.6, rounds=late)
            theta[1] = theta[1] + factors.on_weights * pending
            kept[1], owed = kept[1] + factors.on_remembered * pending, owed + factors.owed * pending
    return (theta[0] + theta[1]) / 2, (kept[0] + kept[1]) / 2


def error_after(form, scheme, n, gamma, *, rounds, runs, drop=0.0):
    """Mean squared consensus error over many runs without drifts, per round. Tensors are (runs, n, 1)."""
    source = generator(7)
    x = torch.randn(runs, n, 1, generator=source, dtype=torch.float64)
    remembered, errors = mixing.start(form, x), []
    for _ in range(rounds):
        errors.append((x - x.mean(1, keepdim=True)).square().mean().item())
        made = mixing.offer(form, x, x, remembered, lr=1.0, momentum=gamma)
        seats = torch.rand(runs, n, generator=source).argsort(1)
        turned = [seats.roll(s, 1) for s in (1, -1)] if scheme == "two_peer" else [swapped(seats)]
        received = []
        for neighbour in turned:
            met = torch.empty_like(seats).scatter_(1, seats, neighbour).unsqueeze(-1)
            received.append(made.sent.gather(1, met))
        mixed = mixing.mix(made.sent, received, [1 / (len(turned) + 1)] * len(turned))
        if drop:
            assert scheme == "one_peer"
            # A pair fails as one: its lot hangs on its seat, which both ends know.
            lots = torch.rand(runs, n // 2, generator=source).repeat_interleave(2, 1)
            failed = torch.empty_like(lots).scatter_(1, seats, lots).unsqueeze(-1) < drop
            mixed = torch.where(failed, made.sent, mixed)
        x, remembered = mixing.settle(made, mixed)
    return errors


def swapped(seats):
    return seats.reshape(len(seats), -1, 2).flip(2).reshape(seats.shape)


@pytest.mark.parametrize(("scheme", "n"), [("one_peer", 8), ("two_peer", 8), ("two_peer", 5)])
def test_squared_error_falls_by_the_second_eigenvalue_a_round(scheme, n):
    errors = error_after("mixed", scheme, n, 0.0, rounds=6, runs=20_000)
    factor = (errors[-1] / errors[0]) ** (1 / 5)
    assert factor == pytest.approx(stability.second_eigenvalue(scheme, n), rel=0.02)


def test_dropped_exchanges_slow_the_contraction_as_they_should():
    errors = error_after("mixed", "one_peer", 8, 0.0, rounds=6, runs=20_000, drop=0.3)
    rho = 6 / 14
    assert (errors[-1] / errors[0]) ** (1 / 5) == pytest.approx(1 - 0.7 * (1 - rho), rel=0.02)


def test_local_momentum_on_pairs_grows_by_nineteen_percent_a_round():
    errors = error_after("local", "one_peer", 16, 0.9, rounds=40, runs=4000)
    growth = (errors[-1] / errors[19]) ** (1 / 20)
    assert growth == pytest.approx(1.19, rel=0.02)
    assert growth == pytest.approx(stability.growth("local", "one_peer", 0.9, n=16), rel=0.02)


def test_mixed_momentum_on_rings_does_not_grow():
    errors = error_after("mixed", "two_peer", 16, 0.9, rounds=40, runs=500)
    assert errors[-1] < errors[0] / 10


def ring_rounds(n, gamma):
    """Rounds until the slowest difference on a static ring has shrunk to a thousandth."""
    x = torch.cos(2 * math.pi * torch.arange(n, dtype=torch.float64) / n)
    remembered, first, count = mixing.start("mixed", x), x.norm(), 0
    while x.norm() > first / 1000:
        made = mixing.offer("mixed", x, x, remembered, lr=1.0, momentum=gamma)
        x, remembered = mixing.settle(
            made, mixing.mix(made.sent, [made.sent.roll(1), made.sent.roll(-1)], [1 / 3, 1 / 3])
        )
        count += 1
    return count


@pytest.mark.parametrize(
    ("with_momentum", "slope", "sizes"), [(False, 1.0, (12, 24, 48, 96)), (True, 0.5, (48, 96, 192, 384))]
)
def test_rounds_on_a_ring_scale_with_chi_and_with_its_root_under_momentum(with_momentum, slope, sizes):
    points = []
    for n in sizes:
        lam = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / n)
        gamma = stability.consensus_momentum(lam) if with_momentum else 0.0
        points.append((math.log(1 / (1 - lam)), math.log(ring_rounds(n, gamma))))
    xs, ys = torch.tensor(points, dtype=torch.float64).T
    fitted = ((xs - xs.mean()) * (ys - ys.mean())).sum() / (xs - xs.mean()).square().sum()
    assert fitted.item() == pytest.approx(slope, abs=0.03)


def test_consensus_error_by_hand():
    error = mixing.consensus_error([torch.tensor([3.0, 1.0]), torch.tensor([3.0, 5.0])])
    assert (error.mean_norm, error.mean_square) == (2.0, 4.0)
    assert error.relative == pytest.approx(2 / math.sqrt(18))


def test_equal_models_have_no_consensus_error_and_opposite_ones_an_infinite_relative_one():
    one = torch.randn(10, generator=generator())
    assert mixing.consensus_error([one, one, one]).mean_norm < 1e-7
    assert mixing.consensus_error([torch.zeros(3), torch.zeros(3)]).relative == 0.0
    assert mixing.consensus_error([torch.ones(3), -torch.ones(3)]).relative == math.inf


def test_all_pairs_give_the_consensus_error_exactly():
    models = [torch.randn(30, generator=generator(seed), dtype=torch.float64) for seed in range(7)]
    distances = [mixing.squared_distance(a, b) for a, b in itertools.combinations(models, 2)]
    estimate = mixing.mean_square_from_pairs(distances, 7)
    assert estimate == pytest.approx(mixing.consensus_error(models).mean_square, rel=1e-12)


def test_the_pairs_of_some_rounds_estimate_the_consensus_error():
    models = {name: torch.randn(30, generator=generator(k)) for k, name in enumerate(view_of(8))}
    distances = []
    for round_ in range(200):
        for row in topology.rows("one_peer", view_of(8), topology.RoundKey(0, 0, round_)):
            distances.append(mixing.squared_distance(models[row.worker], models[row.partners[0]]))
    exact = mixing.consensus_error(list(models.values())).mean_square
    assert mixing.mean_square_from_pairs(distances, 8) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("form", stability.FORMS)
def test_nothing_passed_in_is_changed(form):
    given = [torch.randn(5, generator=generator(seed)) for seed in range(4)]
    copies = [x.clone() for x in given]
    anchor, reached, remembered, received = given
    made = mixing.offer(form, anchor, reached, remembered, lr=0.7, momentum=0.5)
    sent = made.sent.clone()
    mixing.settle(made, mixing.mix(made.sent, [received], [0.3]))
    assert all(torch.equal(x, copy) for x, copy in zip([*given, made.sent], [*copies, sent], strict=True))


def test_models_of_different_shapes_or_types_are_not_mixed():
    with pytest.raises(AssertionError):
        mixing.mix(torch.zeros(3), [torch.zeros(1)], [0.5])
    with pytest.raises(AssertionError):
        mixing.mix(torch.zeros(3), [torch.zeros(3, dtype=torch.float64)], [0.5])
