"""The courier's half of a learner's compute port, over a real channel and a real region."""

import numpy as np
import pytest

from archipel.numerics import codec
from archipel.protocol import messages as m
from archipel.protocol.messages import TensorSpec
from archipel.runtime import frames
from archipel.runtime.courier import CourierCompute
from archipel.runtime.shared import Channel, Region, SlotPool

NUMELS = (4, 3)
SETTINGS = {"sync": {"fragments": 2, "interval_steps": 4, "push_codec": "float32"}}


class Bench:
    """A courier's port, and the trainer's end of everything it touches."""

    def __init__(self, rounded=(), **sync):
        self.trainer, fd = Channel.pair()
        self.channel = Channel.from_fd(fd)
        self.events = []
        self.port = CourierCompute(self.channel, self.events.append)
        self.act(m.Prepare({"sync": {**SETTINGS["sync"], **sync}}, shard=2, position=64))
        layout = frames.layout(NUMELS, self.port.options.overlap_steps)
        self.region = Region.create(layout.nbytes)
        self.copies = SlotPool(self.region, layout.snapshot_slots, layout.slot_numel)
        self.updates = SlotPool(
            self.region, layout.update_slots, layout.slot_numel, offset=layout.updates_offset, home=False
        )
        ready = frames.Ready((TensorSpec("a", (4,)), TensorSpec("b", (3,))), layout, rounded)
        self.trainer.send(frames.encode(ready), [self.region.fd])
        self.pump()

    def pump(self):
        """Let the courier take what the trainer said."""
        for data in self.channel.receive():
            self.port.receive(frames.decode(data))

    def heard(self, kind=frames.Frame):
        """Return what the trainer was told since the last call."""
        return [frame for data in self.trainer.receive() if isinstance(frame := frames.decode(data), kind)]

    def act(self, action, payload=None):
        self.port.act(action, payload)

    def say(self, frame):
        self.trainer.send(frames.encode(frame))
        self.pump()

    def apply(self, fragment, version, values):
        """An update comes in; the trainer writes it at once."""
        self.act(m.Apply(fragment, version), codec.encode("float32", np.array(values, np.float32), 128))
        for write in self.heard(frames.Write):
            self.say(frames.Wrote(write.fragment, write.version, write.slot, 0))

    def step(self, number, **copies):
        taken = []
        for name, values in copies.items():
            fragment, slot = int(name[1:]), self.copies.take()
            self.copies.view(slot, NUMELS[fragment])[:] = values
            taken.append((fragment, slot))
        self.say(frames.Stepped(number, 10, 0.1, tuple(taken), 5))
        for free in self.heard(frames.Free):
            self.copies.give(free.slot)

    def pushed(self, fragment, *, full=False):
        push = m.Push(fragment, tick=1, base=0, step=1, steps=1, tokens=10, total=10, full=full)
        return np.frombuffer(self.port.payload(push), np.float32)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.port.close()


def test_settings_reach_the_trainer_and_its_model_the_machine(bench):
    (build,) = bench.heard(frames.Build)
    assert (build.shard, build.position) == (2, 64)
    assert bench.events == [m.Prepared((TensorSpec("a", (4,)), TensorSpec("b", (3,))))]


def test_push_is_the_version_that_landed_minus_the_copy(bench):
    bench.apply(0, 0, [1, 2, 3, 4])
    bench.step(1, f0=[1, 1, 1, 1])
    assert bench.events[-1] == m.StepCompleted(1, 10, 0.1, (0,), 5)
    assert bench.pushed(0).tolist() == [0, 1, 2, 3]
    assert bench.pushed(0, full=True).tolist() == [1, 1, 1, 1]


def test_payload_does_not_change_when_its_copy_is_taken_again(bench):
    bench.apply(0, 0, [1, 2, 3, 4])
    bench.step(1, f0=[0, 0, 0, 0])
    sent = bench.pushed(0, full=True)
    bench.step(2, f0=[9, 9, 9, 9])
    bench.step(3, f0=[8, 8, 8, 8])
    assert sent.tolist() == [0, 0, 0, 0]


def test_slots_of_older_copies_come_back(bench):
    bench.apply(0, 0, [0] * 4)
    bench.apply(1, 0, [0] * 3)
    for number in range(1, 30):
        bench.step(number, **({"f0": [1] * 4} if number % 2 else {"f1": [1] * 3}))
    assert bench.copies.free == bench.copies.slots - 1


def test_landing_releases_the_copy_and_moves_the_base(bench):
    bench.apply(0, 0, [0, 0, 0, 0])
    bench.step(1, f0=[1, 1, 1, 1])
    bench.apply(0, 1, [5, 5, 5, 5])
    assert bench.events[-1] == m.Applied(0, 1, 0)
    for free in bench.heard(frames.Free):
        bench.copies.give(free.slot)
    assert bench.copies.free == bench.copies.slots
    bench.step(2, f0=[4, 5, 6, 7])
    assert bench.pushed(0).tolist() == [1, 0, -1, -2]


def test_update_waits_for_the_one_before_it_and_gives_way_to_a_newer(bench):
    for version in range(4):
        bench.act(m.Apply(0, version), codec.encode("float32", np.full(4, version, np.float32), 128))
    (first,) = bench.heard(frames.Write)
    assert first.version == 0 and bench.updates.view(first.slot, 4).tolist() == [0, 0, 0, 0]
    bench.say(frames.Wrote(0, 0, first.slot, 1))
    (last,) = bench.heard(frames.Write)
    assert last.version == 3 and bench.updates.view(last.slot, 4).tolist() == [3, 3, 3, 3]


def test_update_without_a_payload_is_ignored_with_a_message(bench, caplog):
    bench.apply(0, 0, [1, 2, 3, 4])
    bench.act(m.Apply(0, 1))
    assert "ignored update fragment=0 version=1: no payload" in caplog.text
    assert bench.heard(frames.Write) == []
    bench.apply(0, 2, [5, 5, 5, 5])
    assert bench.events[-1] == m.Applied(0, 2, 0)


def test_base_is_rounded_as_the_trainer_rounds_it():
    bench = Bench(rounded=(frames.Rounded(0, 0, 2, "bfloat16"),))
    value = 1 + 2**-12
    bench.apply(0, 0, [value] * 4)
    bench.step(1, f0=[1, 1, value, value])  # the first two are kept in bfloat16
    assert bench.pushed(0).tolist() == [0, 0, 0, 0]
    bench.port.close()


def test_error_feedback_sends_later_what_the_codec_lost():
    bench = Bench(error_feedback=True, push_codec="int4")
    bench.apply(0, 0, [0, 0, 0, 0])
    totals = np.zeros(4)
    for number in range(1, 41):
        bench.step(number, f0=[-1, -0.05, 0, 0])
        push = m.Push(0, tick=1, base=0, step=1, steps=1, tokens=10, total=10)
        totals += codec.decode("int4", bench.port.payload(push), 4, 128)
    assert totals[1] / 40 == pytest.approx(0.05, rel=0.1)
    bench.port.close()


def test_trainer_is_told_to_hold_go_on_copy_and_stop(bench):
    bench.heard()
    for action in (m.Hold(), m.Resume(), m.Copy((1, 0)), m.Stop("tick 5 of 5")):
        bench.act(action)
    assert bench.heard() == [
        frames.Pace(True), frames.Pace(False), frames.Watch((1, 0)), frames.Halt("tick 5 of 5", True)
    ]  # fmt: skip


def test_settled_comes_after_everything_a_step_calls_for_where_the_trainer_may_wait():
    bench = Bench(overlap_steps=0)
    bench.heard()
    bench.port._said = lambda event: bench.act(m.Hold())
    bench.say(frames.Stepped(1, 10, 0.1))
    assert bench.heard() == [frames.Pace(True), frames.Settled(1)]
    bench.port.close()


def test_last_words_of_a_trainer_ask_to_stop(bench):
    bench.say(frames.Ended("ValueError: mine"))
    assert bench.events[-1] == m.StopRequested("ValueError: mine")
