"""A peer's half of a trainer: two of them exchange models through the frames their couriers would send."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import CheckpointError
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.roles.exchanges import Exchanges
from archipel.runtime import frames
from archipel.runtime.lending import Lender, borrow
from archipel.runtime.shared import Channel

SETTINGS = {"gossip": {"outer_lr": 1.0, "outer_momentum": 0.0}, "run": {"name": "r"}}


class Peer:
    """One peer's half with a `Linear(2, 1)` of zeros, and its courier's end of the channel."""

    def __init__(self, folder: Path, *, find: bool = False) -> None:
        self.courier, fd = Channel.pair()
        self.channel = Channel.from_fd(fd)
        self.lender = Lender(2)
        self.half = Exchanges(folder, "r")
        self.kept = self.half.find() if find else -1
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.half.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.half.settle(SETTINGS)
        self.half.open(self.channel, self.model, {})
        assert isinstance(self.heard()[0][0], frames.Ready)

    def ask(self, action: Any, payload: bytes | None = None) -> list[tuple[frames.Frame, bytes | None]]:
        """Ask; return what is said to it, each with its payload."""
        stretch, descriptors = None, []
        if payload is not None:
            filled = self.lender.take(len(payload))
            filled[:] = np.frombuffer(payload, np.uint8)
            stretch, descriptor = self.lender.lend(filled)
            descriptors = [descriptor]
        self.courier.send(frames.encode(frames.Asked(action, stretch)), descriptors)
        for data in self.channel.receive(1.0):
            self.half.take(frames.decode(data))
        return self.heard()

    def heard(self) -> list[tuple[frames.Frame, bytes | None]]:
        found = []
        for data in self.courier.receive():
            frame = frames.decode(data)
            stretch = frame.stretch if isinstance(frame, frames.Answered) else None
            found.append((frame, bytes(borrow(self.courier, stretch)) if stretch else None))
        return found

    def moves_to(self, *weights: float) -> None:
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([weights]))

    @property
    def weights(self) -> list[float]:
        return self.model.weight.flatten().tolist()


@pytest.fixture
def pair(tmp_path: Path):
    made = Peer(tmp_path / "a"), Peer(tmp_path / "b")
    yield made
    for peer in made:
        peer.half.close()


def test_a_pair_exchanges_offers_and_ends_bitwise_equal(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.moves_to(1.0, 0.1)
    b.moves_to(0.0, 0.3)
    offers = [peer.ask(g.Offer(0))[-1][1] for peer in pair]
    for peer, name, offer in ((a, "b", offers[1]), (b, "a", offers[0])):
        [(freed, _)] = peer.ask(g.Take(0, name), offer)
        assert freed == frames.Free(0)  # the stretch goes back at once
        [(answered, _)] = peer.ask(g.Mix(0, (name,), (0.5,)))
        assert isinstance(answered, frames.Answered) and isinstance(answered.event, g.Mixed)
    assert a.weights == b.weights == pytest.approx([0.5, 0.2]) and a.half.round == 1


def test_a_captured_state_makes_a_clone(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.moves_to(3.0, 4.0)
    a.ask(g.Offer(0))
    a.ask(g.Mix(0))
    [(captured, state)] = a.ask(g.Capture(1, "b"))
    assert isinstance(captured, frames.Answered) and captured.event == g.Captured(1, "b")
    said = [frame for frame, _ in b.ask(g.Adopt(1), state)]
    assert frames.Answered(g.Adopted(1)) in said
    assert b.weights == [3.0, 4.0] and b.half.round == 1


def test_the_writer_makes_the_mean_and_leaves_it_once(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    left: list[Any] = []
    a.half.finished = b.half.finished = left.append
    for peer, weights in ((a, (2.0, 0.0)), (b, (0.0, 4.0))):
        peer.moves_to(*weights)
        peer.ask(g.Offer(0))
        peer.ask(g.Mix(0))
    [(_, final)] = b.ask(g.Submit(1))
    a.ask(g.Submit(1))
    a.ask(g.Gather(1, "a"))
    a.ask(g.Gather(1, "b"), final)
    [(averaged, mean)] = a.ask(g.Average(1, ("a", "b"), (1.0, 2.0)))
    assert isinstance(averaged, frames.Answered) and isinstance(averaged.event, g.Averaged)
    a.ask(g.Accept(averaged.event.digest))
    b.ask(g.Accept(averaged.event.digest), mean)
    assert a.weights == b.weights == [1.0, 2.0]
    assert len(left) == 1 and left[0]["weight"].tolist() == [[1.0, 2.0]]


def test_a_checkpoint_brings_a_peer_back_to_its_round(tmp_path: Path) -> None:
    first = Peer(tmp_path / "a")
    first.moves_to(5.0, 6.0)
    first.ask(g.Offer(0))
    first.ask(g.Mix(0))
    first.ask(m.Save(1))
    first.half.close()
    again = Peer(tmp_path / "a", find=True)
    assert (again.kept, again.half.round, again.weights) == (1, 1, [5.0, 6.0])
    assert Peer(tmp_path / "b", find=True).kept == -1
    with pytest.raises(CheckpointError, match="'r'"):
        Exchanges(tmp_path / "a", "another run").find()
