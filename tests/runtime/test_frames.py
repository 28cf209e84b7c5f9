"""How the region between trainer and courier is cut, and that every frame survives the way."""

import pytest

from archipel.protocol.messages import TensorSpec
from archipel.protocol.schedule import SyncOptions
from archipel.runtime import frames
from archipel.runtime.shared import ALIGNMENT


@pytest.mark.parametrize(
    "frame",
    [
        frames.Ready(
            (TensorSpec("a", (2, 3)),), frames.layout((6,), 2), (frames.Rounded(0, 0, 6, "bfloat16"),)
        ),
        frames.Stepped(3, 100, 0.5, ((0, 1), (2, 0)), 7),
        frames.Wrote(1, 9, 2, 33),
        frames.Ended("a reason"),
        frames.Build("run", {"sync": {"steps": 5}}, 3, 4096),
        frames.Watch((1, 2)),
        frames.Write(0, 4, 1),
        frames.Free(2),
        frames.Pace(True),
        frames.Settled(12),
        frames.News(99),
        frames.Halt("over", True),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frame_survives_the_way(frame):
    assert frames.decode(frames.encode(frame)) == frame


def test_pools_of_a_layout_do_not_overlap_and_fill_the_region():
    layout = frames.layout((10, 100, 7), overlap_steps=1)
    assert (layout.snapshot_slots, layout.update_slots, layout.slot_numel) == (7, 3, 100)
    slot_bytes = -(-400 // ALIGNMENT) * ALIGNMENT
    assert layout.updates_offset == 7 * slot_bytes and layout.nbytes == 10 * slot_bytes


def test_layout_of_empty_fragments_still_has_an_address():
    layout = frames.layout((0, 0), overlap_steps=0)
    assert layout.slot_numel == 1 and layout.nbytes >= ALIGNMENT


def test_memory_follows_the_overlap_not_the_number_of_fragments():
    few, many = frames.layout((5,) * 5, 2), frames.layout((5,) * 400, 2)
    assert few.nbytes == many.nbytes


def test_a_trainer_hears_of_every_step_only_where_it_may_have_to_wait():
    assert not frames.paced(SyncOptions())
    assert frames.paced(SyncOptions(overlap_steps=0))
    assert frames.paced(SyncOptions(max_lead_steps=2))
