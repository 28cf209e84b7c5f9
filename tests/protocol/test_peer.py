"""The gossip peer and the rendezvous: rounds, partners that fail, rejoining by cloning, the end."""

import pytest

from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.exchange import Pace, adapted_steps
from archipel.protocol.gossip_rounds import LATE_ROUNDS
from archipel.protocol.peer import PeerMachine
from archipel.protocol.rendezvous import RendezvousMachine

from .gossip_rig import Costs, Rig, cut


def run_of(n: int, costs: dict[str, Costs] | None = None, **options: object) -> Rig:
    rig = Rig(g.GossipOptions(**{"peers": n, "rounds": 8, "local_steps": 5, **options}), costs or {})  # type: ignore[arg-type]
    for number in range(n):
        rig.peer(f"p-{number}")
    return rig


def rendezvous(rig: Rig) -> RendezvousMachine:
    machine = rig.machines[g.RENDEZVOUS]
    assert isinstance(machine, RendezvousMachine)
    return machine


def mixes(rig: Rig, name: str) -> dict[int, tuple[str, ...]]:
    return {action.round: action.workers for _, _, action in rig.actions(g.Mix, name)}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("scheme", ["one_peer", "two_peer", "complete", "one_peer_exponential"])
def test_a_calm_run_ends_with_one_mean_and_a_ledger_that_closes(n: int, scheme: str) -> None:
    rig = run_of(n, scheme=scheme).run()
    assert rig.finished[g.RENDEZVOUS].complete and len(rig.finished) == n + 1
    assert all(finish.complete for finish in rig.finished.values())
    ledger = rendezvous(rig).ledger
    assert ledger.closes() and ledger.table()["consumed"] == n * 8 * 5 * 10
    assert ledger.table()["skipped"] == 0 and len(rig.actions(g.Average)) == 1


def test_partners_mix_each_other_in() -> None:
    rig = run_of(6, scheme="one_peer").run()
    of = {f"p-{number}": mixes(rig, f"p-{number}") for number in range(6)}
    for name, rounds in of.items():
        assert sorted(rounds) == list(range(8))
        for number, workers in rounds.items():
            assert all(of[other][number] == (name,) for other in workers)


def test_a_killed_peer_is_skipped_and_comes_back_by_cloning() -> None:
    rig = run_of(4, scheme="two_peer", rounds=12, timeout_s_max=20.0)
    rig.run(until=30.0)
    gone = rig.machines["p-3"]
    assert isinstance(gone, PeerMachine)
    rig.kill("p-3")
    rig.run(until=45.0)
    rig.peer("p-3", shard=gone.shard, position=gone.position + gone.tokens)
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete and rendezvous(rig).ledger.closes()
    [(_, donor, capture)] = [found for found in rig.actions(g.Capture) if found[0] > 1.0]
    assert capture.worker == "p-3" and donor != "p-3"
    back = rig.machines["p-3"]
    assert isinstance(back, PeerMachine) and back.settled > 3
    last = max(number for number in mixes(rig, "p-3"))
    assert last == 11 and mixes(rig, "p-3")[11]
    assert rendezvous(rig).ledger.table()["lost"] > 0


def test_a_donor_is_told_where_the_newcomer_is() -> None:
    rig = run_of(2, rounds=20)
    rig.run(until=30.0)
    rig.peer("p-9")
    rig.run(until=32.0)
    [donor] = {action.donor for _, _, action in admissions(rig, "p-9")}
    known = [action.members for _, _, action in rig.actions(g.Know, donor)]
    assert g.Address("p-9", "at-p-9") in known[-1] and all(one.name != "p-9" for one in known[0])
    rig.run()
    # Once it is a member, it is known as one.
    assert [one.name for one in rig.actions(g.Know, donor)[-1][2].members].count("p-9") == 1


def admissions(rig: Rig, name: str) -> list[tuple[float, str, g.Admitted]]:
    return [
        (t, who, action.message)
        for t, who, action in rig.actions(m.Send)
        if action.to == name and isinstance(action.message, g.Admitted)
    ]


def test_no_peer_waits_longer_than_the_timeout() -> None:
    slow = {"p-0": Costs(step_s=50.0)}
    rig = run_of(4, slow, scheme="one_peer", timeout_s_max=7.0, adapt=False)
    rig.run(until=400.0)
    offered: dict[tuple[str, int], float] = {}
    for t, name, event, actions in rig.log:
        if isinstance(event, g.Offered):
            offered[name, event.round] = t
        for action in actions:
            if isinstance(action, g.Mix):
                assert t - offered[name, action.round] <= 7.0 + 1e-9
    assert sum(bool(workers) for workers in mixes(rig, "p-1").values()) > 2


def test_a_late_model_is_applied_in_delta_form_by_both_or_neither() -> None:
    slow = {"p-0": Costs(step_s=2.0)}
    rig = run_of(2, slow, scheme="one_peer", timeout_s_max=4.0, adapt=False, rounds=20)
    rig.run()
    mixed = {name: {r for r, w in mixes(rig, name).items() if w} for name in ("p-0", "p-1")}
    late = {name: {a.round for _, _, a in rig.actions(g.Correct, name)} for name in ("p-0", "p-1")}
    assert late["p-0"] | late["p-1"]
    last = 19
    assert (mixed["p-0"] | late["p-0"]) - {last} == (mixed["p-1"] | late["p-1"]) - {last}
    assert rendezvous(rig).ledger.table()["late"] > 0


@pytest.mark.parametrize(("step_s", "late"), [(1.0, False), (2.0, True)])
def test_tensors_of_a_round_are_kept_only_while_a_model_of_it_may_come_late(
    step_s: float, late: bool
) -> None:
    slow = {"p-0": Costs(step_s=step_s)}
    rig = run_of(2, slow, scheme="one_peer", timeout_s_max=4.0, adapt=False, rounds=20)
    rig.run()
    kept = {0}  # rounds of which something is kept when a round is settled
    for name in ("p-0", "p-1"):
        settled = first = 0
        for action in [a for _, worker, _, actions in rig.log if worker == name for a in actions]:
            match action:
                case g.Mix(round=number):
                    settled = number
                case g.Correct(round=number):
                    assert number >= first
                case g.Drop(round=first):
                    kept.add(settled + 1 - first)
    assert max(kept) <= LATE_ROUNDS and late == (max(kept) > 0)


@pytest.mark.parametrize("at", [5.0, 9.0, 12.0])  # in the steps, and while models are on their way
def test_partners_cut_off_for_a_moment_still_meet_in_that_round(at: float) -> None:
    slower = {"p-1": Costs(1.4)}  # at 12 it has mixed, and the other has not
    rig = run_of(2, slower, scheme="one_peer", timeout_s_max=500.0, timeout_s_min=400.0, rounds=6)
    rig.at(at, cut, rig, "p-0", "p-1")
    rig.at(at + 0.5, rig._link, "p-0", "p-1")
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete and rig.now < 100
    assert sum(not workers for name in ("p-0", "p-1") for workers in mixes(rig, name).values()) <= 3


def test_a_slow_link_lowers_the_local_steps_of_its_peer_only() -> None:
    slow = {"p-0": Costs(transfer_s=30.0)}
    rig = run_of(8, slow, scheme="one_peer", local_steps=30, rounds=40).run()
    steps = {name: machine.exchange for name, machine in rig.machines.items() if name != g.RENDEZVOUS}
    reports = [a.message for _, _, a in rig.actions(m.Send, "p-0") if isinstance(a.message, g.Report)]
    assert reports[-1].local_steps == 3  # floor(30 − 3·(1/0.1 − 1))
    others = [a.message for _, _, a in rig.actions(m.Send, "p-5") if isinstance(a.message, g.Report)]
    assert others[-1].local_steps == 30 and steps


def test_a_slow_neighbour_in_most_rounds_is_not_taken_for_an_own_slow_line() -> None:
    rig = run_of(4, {"p-3": Costs(transfer_s=30.0)}, scheme="two_peer", local_steps=30, rounds=60).run()
    reports = {name: [] for name in ("p-0", "p-1", "p-2", "p-3")}  # type: ignore[var-annotated]
    for _, name, action in rig.actions(m.Send):
        if isinstance(action.message, g.Report):
            reports[name].append(action.message.local_steps)
    assert reports["p-3"][-1] <= 4
    for name in ("p-0", "p-1", "p-2"):
        assert set(reports[name][-40:]) == {30}, (name, reports[name])


def test_peers_with_another_view_skip_instead_of_mixing_wrongly() -> None:
    peer = PeerMachine("a", "a.1", "test", "at-a")
    peer.handle(0.0, m.Connected(g.RENDEZVOUS))
    settings = {"gossip": {"peers": 2, "rounds": 4, "local_steps": 1, "scheme": "one_peer"}}
    peer.handle(0.0, m.Received(g.RENDEZVOUS, g.Admitted("test", settings, 0, 0)))
    peer.handle(0.0, m.Prepared((m.TensorSpec("w", (2,)),)))
    members = (g.Address("a", ""), g.Address("b", ""))
    peer.handle(0.0, m.Received(g.RENDEZVOUS, g.View(2, 0, members)))
    theirs = g.Meet("test", 1, 0, "other", peer.rounds.schema, "mixed", "a")
    actions = peer.handle(1.0, m.Received("b", theirs))
    assert any(isinstance(a, m.Send) and isinstance(a.message, g.Decline) for a in actions)
    peer.handle(2.0, m.StepCompleted(1, 10, 1.0))
    assert peer.handle(2.0, g.Offered(0)) == [
        m.Notice("skipped round=0 partners={'b': 'epoch 1 there, 2 here'}", "warning"),
        g.Mix(0),
    ]


def test_the_rendezvous_may_die_and_come_back_from_its_checkpoint() -> None:
    rig = run_of(3, rounds=12).run(until=20.0)
    state = rendezvous(rig).snapshot()
    rig.kill(g.RENDEZVOUS)
    rig.run(until=40.0)
    before = {name: machine.settled for name, machine in rig.machines.items()}  # type: ignore[union-attr]
    assert min(before.values()) >= 3
    rig.rendezvous(state)
    for name in before:
        rig.at(rig.now + 1.0, rig._link, name, g.RENDEZVOUS)
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete and rendezvous(rig).ledger.closes()


def test_a_new_peer_that_finds_a_rendezvous_just_restarted_waits_for_the_run() -> None:
    rig = run_of(3, rounds=16)
    rig.run(until=40.0)
    state = rendezvous(rig).snapshot()
    rig.kill(g.RENDEZVOUS)
    rig.run(until=45.0)
    rig.rendezvous(state)
    rig.peer("p-9")  # before any peer of the run is back
    rig.run(until=50.0)
    assert "p-9" in rendezvous(rig).early and not rig.actions(m.Prepare, "p-9")
    for number in range(3):
        rig.at(60.0, rig._link, f"p-{number}", g.RENDEZVOUS)
    rig.run()
    [adopted] = rig.actions(g.Adopt, "p-9")
    assert adopted[2].round > 4 and rig.finished[g.RENDEZVOUS].complete


def test_a_new_peer_begins_anew_where_no_peer_of_the_run_comes_back() -> None:
    rig = run_of(2, start_s_max=20.0)
    rig.run(until=30.0)
    state = rendezvous(rig).snapshot()
    for name in (g.RENDEZVOUS, "p-0", "p-1"):
        rig.kill(name)
    rig.rendezvous(state)
    rig.peer("p-9")
    rig.run(until=200.0)
    [(began, _, _)] = rig.actions(m.Prepare, "p-9")
    assert began == pytest.approx(50.0, abs=1.0) and rig.finished[g.RENDEZVOUS].complete


def test_a_new_peer_waits_for_one_that_brings_a_checkpoint() -> None:
    rig = run_of(0, peers=2)
    rig.peer("p-0", kept=5)
    rig.run(until=0.011)
    rig.peer("p-1")
    rig.run()
    [adopted] = rig.actions(g.Adopt, "p-1")
    assert adopted[2].round == 5


def test_a_group_that_resumes_gathers_before_its_first_round() -> None:
    rig = run_of(3, rounds=12)
    rig.run(until=40.0)
    state = rendezvous(rig).snapshot()
    for name in ("p-0", "p-1", "p-2", g.RENDEZVOUS):
        rig.kill(name)
    rig.rendezvous(state)
    rig.peer("p-0", kept=2)
    rig.run(until=50.0)
    rig.peer("p-1", kept=3)
    rig.peer("p-2", kept=3)
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete
    resumed = [action for t, _, action in rig.actions(g.Mix) if t > 40.0]
    assert min(mix.round for mix in resumed) == 3 and all(mix.workers for mix in resumed)


def test_a_peer_with_another_model_is_refused() -> None:
    rig = run_of(2)
    rig.run(until=2.0)
    machine = rendezvous(rig)
    actions = machine.handle(3.0, m.Received("x", g.Enrol("test", "x.1", "at-x", schema="other")))
    [refusal] = [a.message for a in actions if isinstance(a, m.Send)]
    assert refusal.final and "the model differs" in refusal.reason


def test_a_writer_that_dies_at_the_end_is_replaced() -> None:
    rig = run_of(3, rounds=3)
    while not rig.actions(g.Submit):
        rig.run(until=rig.now + 0.05)
    rig.kill("p-0")
    rig.run()
    assert rig.finished[g.RENDEZVOUS].complete
    assert [action.members for _, _, action in rig.actions(g.Average)] == [("p-1", "p-2")]


def test_a_rising_consensus_error_raises_an_alarm() -> None:
    rig = run_of(2, rounds=9, alarm_rounds=3)
    count = 0

    def growing(action: m.Action) -> m.Event | None:
        nonlocal count
        if isinstance(action, g.Mix):
            count += 1
            return g.Mixed(action.round, 1.2**count, 100.0)
        return Rig.answer(action)

    rig.answer = growing  # type: ignore[method-assign]
    rig.run()
    assert any("peers drift apart" in a.text for _, _, a in rig.actions(m.Notice, g.RENDEZVOUS))


def test_a_state_that_takes_long_is_asked_for_once() -> None:
    rig = run_of(2, {"p-1": Costs(transfer_s=500.0)}, start_s_max=1e4, rounds=1, timeout_s_max=600.0)
    rig.run()
    asked = [action for _, _, action in rig.actions(m.Send, "p-1") if isinstance(action.message, g.Clone)]
    assert len(asked) == 1 and len(rig.actions(g.Capture)) == 1
    assert rig.finished[g.RENDEZVOUS].complete


def test_a_lost_peer_does_not_delay_the_start_nor_another_lease() -> None:
    options = g.GossipOptions(peers=3, start_s_max=10.0, lease_s=4.0)
    machine = RendezvousMachine("test", options, {}, shards=8)
    for name in ("a", "b", "c"):
        machine.handle(0.0, m.Received(name, g.Enrol("test", f"{name}.1", f"at-{name}")))
    assert machine.handle(0.0, m.Received("a", g.Ready(0, "s"))) == [m.Wake(10.0)]
    assert machine.handle(7.0, m.Disconnected("b")) == [m.Wake(10.0)]
    started = machine.handle(10.0, m.Woke())
    assert machine.state == "running" and started[-1] == m.Wake(11.0)
    assert m.Notice("lost peer=b", "warning") in machine.handle(11.0, m.Woke())


@pytest.mark.parametrize(
    ("transfer_s", "steps"), [(3.0, 5), (3.2, 5), (3.5, 4), (5.98, 2), (6.1, 1), (9.0, 1)]
)
def test_being_a_hair_late_costs_no_step(transfer_s: float, steps: int) -> None:
    """H = 5 steps of 1 s and a transfer of 3 s are the others' round: 8 s."""
    own = Pace(step_s=1.0)
    own.transfers.append(transfer_s)
    assert adapted_steps(g.GossipOptions(local_steps=5), own, 8.0) == steps


def test_peers_that_fell_out_of_step_meet_again() -> None:
    """Whoever is ahead of most others waits for them instead of missing them in every round to come."""
    rig = run_of(6, scheme="one_peer", rounds=40, timeout_s_max=20.0, adapt=False)
    rig.run(until=60.0)
    for number in range(5):
        rig.costs[f"p-{number}"] = Costs(step_s=6.0)
    rig.run(until=150.0)
    rig.costs.clear()
    rig.run()
    reports = [a.message for _, _, a in rig.actions(m.Send) if isinstance(a.message, g.Report)]
    skipped = {report.round for report in reports if report.fate == "skipped"}
    assert skipped and max(skipped) < 20


def test_a_handshake_for_a_round_that_is_over_is_declined_at_the_end_too() -> None:
    rig = run_of(2, rounds=2)
    while (peer := rig.machines["p-0"]).state != "concluding":
        rig.run(until=rig.now + 0.5)
    assert isinstance(peer, PeerMachine)
    meet = g.Meet("test", 1, 1, "view", "schema", "mixed", "p-0")
    assert peer.handle(rig.now, m.Received("p-1", meet)) == [
        m.Send("p-1", g.Decline(1, 2, "the round is over here"))
    ]
