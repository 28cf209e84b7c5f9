"""The trainer's half of a learner, with the courier's end of the channel in the test's hands."""

import subprocess

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import JoinRefused, WorkerDied
from archipel.roles import trainer as module
from archipel.roles.fragments import Fragments
from archipel.roles.trainer import Trainer
from archipel.runtime import frames
from archipel.runtime.shared import Channel, Region, SlotPool

torch.set_num_threads(1)


class Ended:
    """A process that is over, or will be when waited for."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = -9

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired("courier", timeout or 0.0)
        return self.code

    def kill(self) -> None:
        self.code = -9


class Bench:
    """A trainer of `Linear(2, 1)` in one fragment, and what its courier would hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stopped=lambda: "", **sync) -> None:
        def spawn(arguments, fd, *, env=None):
            self.courier = Channel.from_fd(fd)
            return Ended()

        monkeypatch.setattr(module, "spawn_courier", spawn)
        self.half = Fragments()
        self.trainer = Trainer([], self.half, stopped=stopped)
        self.model = nn.Linear(2, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.settings = {"sync": {"fragments": 1, "interval_steps": 4, **sync}}

    def say(self, *said: frames.Frame) -> None:
        for frame in said:
            self.courier.send(frames.encode(frame))

    def heard(self, kind=frames.Frame) -> list:
        return [f for data in self.courier.receive() if isinstance(f := frames.decode(data), kind)]

    def adopt(self) -> None:
        """Go through a join whose weights are 0, 1, 2."""
        self.say(frames.Build("run", self.settings, 3, 64))
        assert self.trainer.settings() == self.settings
        self.say(frames.Pace(False))  # nothing is missing: the weights the trainer has are the run's
        self.trainer.adopt(self.model)
        (ready,) = self.heard(frames.Ready)
        layout = ready.layout
        self.region = Region.attach(self.courier.descriptors.popleft(), layout.nbytes)
        self.snapshots = SlotPool(self.region, layout.snapshot_slots, layout.slot_numel, home=False)
        self.updates = SlotPool(
            self.region, layout.update_slots, layout.slot_numel, offset=layout.updates_offset
        )

    def update(self, version: int, values: list[float]) -> None:
        slot = self.updates.take()
        assert slot is not None
        self.updates.view(slot, 3)[:] = values
        self.say(frames.Write(0, version, slot))

    @property
    def weights(self) -> list[float]:
        return [self.model.bias.item(), *self.model.weight.flatten().tolist()]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(monkeypatch)
    made.adopt()
    return made


def test_snapshot_is_taken_before_the_update_lands(bench: Bench) -> None:
    bench.say(frames.Watch((0,)))
    bench.update(1, [5.0, 6.0, 7.0])
    bench.trainer.step(10)
    stepped, wrote = bench.heard()
    ((fragment, slot),) = stepped.copies
    assert (stepped.step, stepped.tokens, fragment) == (1, 10, 0)
    assert bench.snapshots.view(slot, 3).tolist() == [0.0, 0.0, 0.0]
    assert bench.weights == [5.0, 6.0, 7.0] and bench.half.versions == [1]
    assert (wrote.fragment, wrote.version, wrote.step) == (0, 1, 1)


def test_snapshot_in_use_is_never_overwritten(bench: Bench) -> None:
    bench.say(frames.Watch((0,)))
    slots = []
    for number in range(10):
        nn.init.constant_(bench.model.bias, float(number))
        bench.trainer.step(1)
        slots += [(slot, number) for s in bench.heard(frames.Stepped) for _, slot in s.copies]
    assert len(slots) == len({slot for slot, _ in slots}) == bench.snapshots.slots
    assert all(bench.snapshots.view(slot, 3)[0] == number for slot, number in slots)
    bench.say(frames.Free(slots[0][0]))
    bench.trainer.step(1)
    assert bench.heard(frames.Stepped)[0].copies == ((0, slots[0][0]),)


def test_reported_tick_is_the_one_the_steps_rate_followed(bench: Bench) -> None:
    bench.say(frames.News(7))
    bench.trainer.step(1)
    bench.trainer.step(1)
    assert [stepped.tick for stepped in bench.heard(frames.Stepped)] == [0, 7]


def test_trainer_does_not_wait_for_its_courier(bench: Bench) -> None:
    for _ in range(100):
        bench.trainer.step(1)
    assert bench.trainer.step_count == 100


def test_blocking_trainer_waits_until_its_step_is_settled_and_the_hold_is_over(monkeypatch) -> None:
    bench = Bench(monkeypatch, overlap_steps=0)
    bench.adopt()
    bench.update(1, [1.0, 1.0, 1.0])
    bench.say(frames.Pace(True), frames.Settled(1), frames.Pace(False))
    bench.trainer.step(1)
    assert bench.weights == [1.0, 1.0, 1.0]


def test_blocking_trainer_does_not_go_on_before_its_step_is_settled(monkeypatch) -> None:
    asked: list[None] = []

    def stopped() -> str:
        asked.append(None)
        return "had enough" if len(asked) > 5 else ""

    bench = Bench(monkeypatch, stopped=stopped, overlap_steps=0)
    bench.adopt()
    monkeypatch.setattr(module, "POLL_S", 0.01)
    asked.clear()
    bench.trainer.step(1)  # nobody holds it, but nobody has settled it either
    assert bench.trainer.done and len(asked) > 5


def test_request_to_stop_ends_every_wait(monkeypatch) -> None:
    reason: list[str] = []
    bench = Bench(monkeypatch, stopped=lambda: "".join(reason), overlap_steps=0)
    bench.adopt()
    monkeypatch.setattr(module, "POLL_S", 0.01)
    reason.append("SIGTERM")
    bench.trainer.step(1)  # nothing settles it
    assert bench.trainer.done and bench.trainer.reason == "SIGTERM"
    bench.trainer.step(1)
    assert len(bench.heard(frames.Stepped)) == 1  # what is done is reported, and no more
    bench.trainer.close("")
    assert bench.heard(frames.Ended) == [frames.Ended("SIGTERM")]


def test_stop_before_the_run_is_joined_returns_empty_settings(monkeypatch) -> None:
    bench = Bench(monkeypatch, stopped=lambda: "SIGINT")
    assert bench.trainer.settings() == {} and bench.trainer.done


def test_waiting_for_a_syncer_is_not_silent(monkeypatch, caplog) -> None:
    answers = iter(["", "", "", "enough"])
    bench = Bench(monkeypatch, stopped=lambda: next(answers))
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "SAY_S", 0.0)
    bench.trainer.settings()
    assert 'waiting for="the run\'s settings" waited_s=0' in caplog.text


def test_refusal_is_raised_with_its_reason(monkeypatch) -> None:
    bench = Bench(monkeypatch)
    bench.say(frames.Halt("run 'a', this syncer serves 'b'", False))
    with pytest.raises(JoinRefused, match="run 'a', this syncer serves 'b'"):
        bench.trainer.settings()
    bench.trainer.close("")


def test_end_of_the_run_is_done_and_no_error(bench: Bench) -> None:
    bench.say(frames.Halt("tick 5 of 5", True))
    bench.trainer.step(1)
    assert bench.trainer.done and bench.trainer.reason == "tick 5 of 5"


def test_dead_courier_is_an_error_that_says_how_it_died(bench: Bench) -> None:
    bench.courier.close()
    with pytest.raises(WorkerDied, match=r"courier process 4711 .* is gone \(signal 9\)"):
        bench.trainer.step(1)
    bench.trainer.close("")
    bench.trainer.close("")  # twice is once


def test_update_for_a_strange_memory_order_lands(monkeypatch) -> None:
    bench = Bench(monkeypatch)
    bench.model.weight.data = torch.zeros(2, 1).t()
    bench.adopt()
    bench.update(1, np.arange(3.0).tolist())
    bench.trainer.step(1)
    assert bench.weights == [0.0, 1.0, 2.0]
