"""A peer's tensors: DiLoCo on complete graphs, pairs equal to the bit, an exact mean, clones, the end."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import ModelError, PayloadError
from archipel.numerics import mixing
from archipel.protocol import gossip as g
from archipel.train.gossip import PeerState

torch.set_num_threads(1)
OPTIONS = {"scheme": "one_peer", "outer_lr": 0.7, "outer_momentum": 0.9}


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)


def peer(seed=0, dtype=torch.float32, evaluate=None, **options):
    built = model(seed, dtype)
    optimizer = torch.optim.AdamW(built.parameters(), lr=0.01)
    state = PeerState(built, optimizer, g.GossipOptions(**{**OPTIONS, **options}), evaluate)
    state.model, state.optimizer = built, optimizer
    return state


def steps(state, count, seed):
    """Train a few steps on data of the seed's."""
    torch.manual_seed(seed)
    dtype = next(state.model.parameters()).dtype
    for _ in range(count):
        state.model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    state.steps += count


def exchange(peers, number, weight=None, late=()):
    """All offer, all mix all others in but those that are late: pairs (receiver, sender) of names."""
    for state in peers.values():
        state.act(g.Offer(number))
    share = weight or 1 / len(peers)
    mixed = {}
    for name, state in peers.items():
        for other in sorted(set(peers) - {name}):
            if (name, other) not in late:
                assert state.take(number, other, peers[other].payload(name, g.Model(number))) == ""
    payloads = {name: peers[name].payload("", g.Model(number)) for name in peers}
    for name, state in peers.items():
        workers = tuple(other for other in sorted(set(peers) - {name}) if (name, other) not in late)
        mixed[name] = state.act(g.Mix(number, workers, (share,) * len(workers)))
    return mixed, payloads


def parameters(state):
    return torch.cat([p.detach().flatten().double() for p in state.model.parameters()])


def mean_of(peers):
    return torch.stack([state.anchor.double() for state in peers.values()]).mean(0)


@pytest.mark.parametrize("form", ["mixed", "postmix", "drift"])
@pytest.mark.parametrize("n", [2, 3])
def test_complete_graph_is_diloco_with_torch_nesterov(form, n):
    peers = {f"p-{k}": peer(form=form) for k in range(n)}
    theta = nn.Parameter(parameters(peers["p-0"]).float())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(12):
        before = theta.detach().clone()
        for k, state in enumerate(peers.values()):
            steps(state, 3, 100 * number + k)
        reached = torch.stack([parameters(state) for state in peers.values()])
        theta.grad = (before - reached.mean(0)).float()
        outer.step()
        exchange(peers, number)
        for state in peers.values():
            assert (parameters(state) - theta.detach()).abs().max() < 2e-6


def test_pairs_end_equal_to_the_bit_and_running_statistics_are_plain_means():
    peers = {"a": peer(), "b": peer()}
    for number in range(3):
        steps(peers["a"], 2, number)
        steps(peers["b"], 2, 50 + number)
        statistics = [state.model[1].running_var.clone() for state in peers.values()]
        mixed, _ = exchange(peers, number)
        assert mixed["a"].digest == mixed["b"].digest == peers["a"].digest()
        assert torch.equal(peers["a"].model[1].running_var, (statistics[0] + statistics[1]) / 2)
    assert mixed["a"].distance == mixed["b"].distance > 0 and mixed["a"].norm > 0


def test_distance_and_norm_are_those_of_what_was_offered():
    peers = {"a": peer(0), "b": peer(1)}
    vectors = [state.anchor.clone() for state in peers.values()]
    mixed, _ = exchange(peers, 0)
    assert mixed["a"].norm == pytest.approx(float(vectors[0].double().square().sum()))
    assert mixed["a"].distance == pytest.approx(mixing.squared_distance(*vectors))


def test_a_round_alone_is_outer_nesterov_of_one_worker():
    state = peer()
    theta = nn.Parameter(parameters(state).float())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(5):
        steps(state, 2, number)
        theta.grad = theta.detach() - parameters(state).float()
        outer.step()
        state.act(g.Offer(number))
        assert state.act(g.Mix(number)).distance == -1.0
        torch.testing.assert_close(parameters(state).float(), theta.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", ["mixed", "local", "postmix", "drift"])
@pytest.mark.parametrize("codec", ["float32", "bf16"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_late_model_leaves_the_mean_where_it_would_be_in_time(form, codec, rounds):
    """Local steps are left out, for they would follow the weights: momentum alone moves the models here."""
    options = {"form": form, "codec": codec, "outer_momentum": 0.5 if rounds else 0.9}
    punctual, tardy = ({k: peer(i, **options) for i, k in enumerate("ab")} for _ in range(2))
    for peers in (punctual, tardy):  # a first round apart gives them different momenta
        for number, state in enumerate(peers.values()):
            steps(state, 3, number)
            state.act(g.Offer(0))
            state.act(g.Mix(0))
    exchange(punctual, 1)
    _, payloads = exchange(tardy, 1, late=[("a", "b")])
    for number in range(2, 2 + rounds):
        for peers in (punctual, tardy):
            for state in peers.values():
                state.act(g.Offer(number))
                state.act(g.Mix(number))
    assert not torch.allclose(mean_of(tardy), mean_of(punctual), atol=1e-4)
    tardy["a"].act(g.Take(1, "b"), payloads["b"])
    tardy["a"].act(g.Correct(1, "b", 0.5, rounds))
    parts = [slice(p.offset, p.offset + p.stop - p.start)
             for p in tardy["a"]._parameters.fragments[0].pieces if p.kind == "parameter"]  # fmt: skip
    for number in range(10, 10 + (300 if rounds else 0)):  # what is owed is added by and by
        for peers in (punctual, tardy):
            exchange(peers, number)
    for number in range(310, 312):  # and it stays there, for what is remembered was corrected too
        for part in parts:
            error = (mean_of(tardy)[part] - mean_of(punctual)[part]).abs().max()
            assert error < (1e-5 if rounds else 2e-6), (number, float(error))
        for peers in (punctual, tardy):
            exchange(peers, number)


def test_a_late_model_keeps_the_drift_of_the_round_under_way():
    peers = {"a": peer(0), "b": peer(1)}
    _, payloads = exchange(peers, 0, late=[("a", "b")])
    state = peers["a"]
    steps(state, 2, 7)
    drift = state.reached() - state.anchor
    state.act(g.Take(0, "b"), payloads["b"])
    state.act(g.Correct(0, "b", 0.5, 0))
    torch.testing.assert_close(state.reached() - state.anchor, drift, atol=1e-6, rtol=0)


def test_what_is_sent_is_not_changed_by_what_comes_after():
    peers = {"a": peer(0), "b": peer(1)}
    state = peers["a"]
    state.act(g.Offer(0))
    payload = state.payload("b", g.Model(0))
    before = payload.copy()
    state.act(g.Mix(0))
    peers["b"].act(g.Offer(0))
    state.act(g.Take(0, "b"), peers["b"].payload("a", g.Model(0)))
    state.act(g.Correct(0, "b", 0.5, 0))
    steps(state, 2, 0)
    state.act(g.Offer(1))
    assert (payload == before).all()


def test_a_payload_that_is_no_model_is_refused_and_the_round_goes_on_without_it():
    peers = {"a": peer(0), "b": peer(1)}
    state, twin = peers["a"], peer(0)
    for one in (state, twin):
        one.act(g.Offer(0))
    bad = np.full(state.numel, np.nan, np.float32)
    assert "NaN" in state.take(0, "b", bad.view(np.uint8))
    assert "bytes" in state.take(0, "b", np.zeros(8, np.uint8))
    assert state.act(g.Mix(0, ("b",), (0.5,))) == twin.act(g.Mix(0))
    state.act(g.Correct(0, "b", 0.5, 0))
    assert state.digest() == twin.digest()


def test_a_peer_whose_weights_are_not_finite_sends_nothing_and_says_so():
    state = peer()
    with torch.no_grad():
        next(state.model.parameters())[0, 0] = math.nan
    with pytest.raises(ModelError, match=r"NaN or Inf after round 3.*takes over a sound peer"):
        state.act(g.Offer(3))


def test_an_offer_that_cannot_be_used_is_named_in_the_log(caplog):
    state = peer()
    state.act(g.Offer(0))
    state.act(g.Take(0, "p-9"), np.full(state.numel, np.nan, np.float32).view(np.uint8))
    assert "worker=p-9" in caplog.text and "NaN or Inf" in caplog.text


def test_dropped_rounds_are_forgotten():
    peers = {"a": peer(0), "b": peer(1)}
    _, payloads = exchange(peers, 0, late=[("a", "b")])
    peers["a"].act(g.Drop(1))
    before = peers["a"].digest()
    peers["a"].act(g.Take(0, "b"), payloads["b"])
    peers["a"].act(g.Correct(0, "b", 0.5, 0))
    assert peers["a"].digest() == before


# ---- whole states ----


def test_a_clone_goes_on_exactly_as_its_donor_does():
    donor, clone = peer(0), peer(5)
    for number in range(2):
        steps(donor, 3, number)
        donor.act(g.Offer(number))
        donor.act(g.Mix(number))
    assert donor.act(g.Capture(2, "c")) == g.Captured(2, "c")
    blob = donor.payload("c", g.State(2, 1))
    steps(clone, 1, 9)
    assert clone.act(g.Adopt(2), blob) == g.Adopted(2)
    assert clone.steps == 6
    for state in (donor, clone):
        steps(state, 3, 77)
        state.act(g.Offer(2))
        state.act(g.Mix(2))
    assert donor.digest() == clone.digest() and donor.remembered.equal(clone.remembered)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    donor, other = peer(0), peer(1)
    steps(donor, 1, 0)
    donor.act(g.Capture(3, "c"))
    blob = donor.payload("c", g.State(3, 0))
    before = other.digest()
    smaller = PeerState(nn.Linear(2, 2), None, g.GossipOptions(**OPTIONS))
    assert "vector of 6 elements" in smaller.act(g.Adopt(3), blob).reason
    assert "of round 3, not 4" in other.act(g.Adopt(4), blob).reason
    assert "no captured state" in other.act(g.Adopt(3), blob[:-7]).reason
    assert "form 'mixed'" in peer(0, form="drift").act(g.Adopt(3), blob).reason
    bare = PeerState(model(), None, g.GossipOptions(**OPTIONS))
    assert "no place for" in bare.act(g.Adopt(3), blob).reason
    donor.anchor[0] = math.inf
    donor.act(g.Capture(3, "c"))
    assert "NaN or Inf" in other.act(g.Adopt(3), donor.payload("c", g.State(3, 0))).reason
    assert other.digest() == before


def test_a_checkpoint_restores_the_whole_state():
    state, again = peer(0), peer(4)
    steps(state, 2, 0)
    state.act(g.Offer(0))
    state.act(g.Mix(0))
    arrays = {name: array.copy() for name, array in state.arrays().items()}
    assert again.restore(arrays, state.facts(1)) == 1
    for one in (state, again):
        steps(one, 2, 1)
    assert torch.equal(parameters(state), parameters(again))


def test_an_optimizer_whose_state_cannot_travel_is_refused_by_name():
    built = model()
    optimizer = torch.optim.LBFGS(built.parameters())
    state = PeerState(built, optimizer, g.GossipOptions(**OPTIONS))
    optimizer.step(lambda: built(torch.ones(2, 4)).sum() * 0.0)
    optimizer.state_dict()["state"][0]["history"] = ["x"]
    optimizer.state[next(iter(optimizer.state))]["history"] = ["x"]
    with pytest.raises(ModelError, match="'history' is a list"):
        state.act(g.Capture(0, "c"))


# ---- less precise models ----


def test_rounding_of_a_bf16_model_is_not_taken_for_learning():
    states = {"a": peer(0, torch.bfloat16, outer_momentum=0.0), "b": peer(1, torch.bfloat16)}
    exchange(states, 0)
    state = states["a"]
    anchor = state.anchor.clone()
    held = torch.cat([p.detach().flatten().float() for p in state.model.parameters()])
    assert (held - held.bfloat16().float()).abs().max() == 0 and not torch.equal(
        anchor.bfloat16().float(), anchor
    )
    state.act(g.Offer(1))
    state.act(g.Mix(1))
    torch.testing.assert_close(state.anchor, anchor, atol=1e-7, rtol=0)


# ---- the end ----


def test_the_mean_is_exact_and_comes_with_its_figures():
    losses = {"a": 2.0, "b": 4.0, "c": 3.0}
    peers = {name: peer(k, evaluate=lambda name=name: losses[name]) for k, name in enumerate("abc")}
    vectors = [state.anchor.clone() for state in peers.values()]
    submitted = {name: state.act(g.Submit(1)) for name, state in peers.items()}
    assert submitted["b"] == g.Submitted(1, 4.0)
    writer = peers["a"]
    writer.act(g.Gather(1, "a"))
    for name in "cb":
        writer.act(g.Gather(1, name), peers[name].payload("a", g.Final(1, 0.0)))
    averaged = writer.act(g.Average(1, ("a", "b", "c"), (2.0, 4.0, 3.0)))
    exact = torch.stack(vectors).double().mean(0)
    expected = mixing.consensus_error(vectors)
    assert averaged.figures["val_loss_mean"] == 3.0 and averaged.figures["val_loss_worst"] == 4.0
    assert (
        averaged.figures["val_loss_mean_model"] == 2.0 and averaged.figures["model_bytes"] == 4 * writer.numel
    )
    rms = math.sqrt(expected.mean_square) / float(exact.norm())
    assert averaged.figures["consensus_error"] == pytest.approx(rms, rel=1e-9)
    mean = writer.payload("b", g.Mean(averaged.digest, 1))
    for name, state in peers.items():
        state.act(g.Accept(averaged.digest), None if name == "a" else mean)
        assert torch.equal(state.anchor, exact.float()) and state.digest() == averaged.digest
    assert np.array_equal(writer.tensors()["0.bias"], peers["c"].model[0].bias.detach().numpy())


def test_a_model_that_is_not_finite_is_left_out_of_the_mean_and_named():
    writer, other = peer(0), peer(1)
    sick = np.full(writer.numel, np.inf, np.float32).view(np.uint8)
    writer.act(g.Gather(1, "a"))
    writer.act(g.Gather(1, "b"), sick)
    writer.act(g.Gather(1, "c"), other.anchor.numpy().view(np.uint8))
    averaged = writer.act(g.Average(1, ("a", "b", "c"), (1.0, -1.0, 3.0)))
    assert averaged.figures["left_out"] == ["b"] and averaged.figures["val_loss_mean"] == 2.0
    writer.act(g.Accept(averaged.digest))
    start, end = peer(0).anchor.double(), other.anchor.double()
    torch.testing.assert_close(writer.anchor, ((start + end) / 2).float(), atol=0, rtol=0)


def test_a_run_whose_models_have_all_diverged_still_ends():
    state = peer()
    state.load(torch.full((state.numel,), torch.nan))
    state.act(g.Submit(1))
    state.act(g.Gather(1, "a"))
    averaged = state.act(g.Average(1, ("a",), (-1.0,)))
    state.act(g.Accept(averaged.digest), state.payload("b", g.Mean(averaged.digest, 1)).copy())
    assert averaged.figures["left_out"] == ["a"] and state.anchor.isnan().all()


def test_a_mean_of_another_digest_is_refused():
    state = peer()
    before = state.digest()
    with pytest.raises(PayloadError, match="not 00"):
        state.act(g.Accept("00"), np.zeros(4 * state.numel, np.uint8))
    assert state.digest() == before


def test_another_attempt_starts_a_new_sum():
    state = peer()
    state.act(g.Gather(1, "a"))
    state.act(g.Gather(2, "a"))
    averaged = state.act(g.Average(2, ("a",), (-1.0,)))
    assert averaged.digest == state.digest() and averaged.figures["consensus_error"] == 0.0
    assert "val_loss_mean" not in averaged.figures
