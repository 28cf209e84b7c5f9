"""What a view of a gossip run shows, from records of a rendezvous."""

from io import StringIO

import msgspec
from rich.console import Console

from archipel.dashboard.peers import PeerSeries
from archipel.dashboard.terminal import View
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.rendezvous import RendezvousMachine
from archipel.tape.record import Header, Record
from archipel.tape.replay import seed_of

OPTIONS = g.GossipOptions(peers=2, rounds=10)


class Run:
    """A rendezvous, and the series that follows its tape."""

    def __init__(self) -> None:
        settings = {"gossip": msgspec.to_builtins(OPTIONS)}
        self.machine = RendezvousMachine("run", OPTIONS, settings, 4)
        header = Header("run", g.RENDEZVOUS, g.RENDEZVOUS, "1", 0.0, {**settings, **seed_of(self.machine)})
        self.series = PeerSeries()
        self.series.mirror(header)
        self.now = 0.0

    def hear(self, sender: str, message: m.Message) -> None:
        self.happen(m.Received(sender, message))  # type: ignore[arg-type]

    def happen(self, event: m.Event) -> None:
        self.now += 1.0
        actions = tuple(self.machine.handle(self.now, event))
        self.series.take_all([Record(0, self.now, event, actions)])

    def begin(self) -> None:
        for name in "ab":
            self.hear(name, g.Enrol("run", name + "1", "x:1"))
            self.hear(name, g.Ready(0, "s"))

    def settle(self, name: str, number: int, fate: g.Fate = "merged") -> None:
        self.hear(name, g.Report(number, 100 * (number + 1), fate, 30, 0.5, 0.1, 0.2, 2.0, 100.0))


def test_peers_rounds_fates_and_the_consensus_error_are_shown() -> None:
    run = Run()
    run.begin()
    run.settle("a", 0)
    run.settle("b", 0, "skipped")
    [first, second] = run.series.words()
    assert first.startswith("round 1 of 10  epoch 1  live 2  consensus error ")
    assert second.startswith("tokens 200: merged 50 %  late 0 %  skipped 50 %")
    shown = StringIO()
    Console(file=shown, width=120).print(run.series.show())
    assert "a " in shown.getvalue() and "skipped" in shown.getvalue()


def test_a_peer_is_back_once_it_has_cloned_and_settled_a_round() -> None:
    run = Run()
    run.begin()
    for number in range(3):
        run.settle("a", number)
        run.settle("b", number)
    assert not run.series.cloning and not run.series.back
    run.hear("b", g.Enrol("run", "b2", "x:2"))
    assert run.series.cloning == {"b": "a"} and not run.series.back
    run.hear("b", g.Ready(3, "s"))
    run.settle("b", 3)
    assert run.series.back == {"b"}


def test_a_view_without_a_terminal_says_it_in_lines() -> None:
    run, file = Run(), StringIO()
    with View(run.series, Console(file=file), shown=PeerSeries.show, said=PeerSeries.status) as view:
        run.begin()
        run.happen(m.Disconnected("b", "gone"))
        view.update(0.0)
    lines = file.getvalue().splitlines()
    assert any(line.startswith("rendezvous: epoch=1") for line in lines)
    assert "round 0 of 10  epoch 1  live 1" in lines[-1]
