"""Shared memory, slots and channels, within one process and, where death matters, between two."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from archipel.errors import ConfigError, PayloadError, TransportError, WorkerDied
from archipel.runtime.shared import FRAME_BYTES_MAX, Channel, Region, SlotPool

DEADLINE_S = 30.0

# A courier in miniature: attaches the region whose descriptor comes first, then answers each frame.
CHILD = """
import sys
from archipel.errors import WorkerDied
from archipel.runtime.shared import Channel, Region, SlotPool

channel = Channel.from_fd(int(sys.argv[1]))
pool = None
try:
    while True:
        for frame in channel.receive(30.0):
            if pool is None:
                region = Region.attach(channel.descriptors.popleft(), int(frame))
                pool = SlotPool(region, 2, 1000, home=False)
            else:
                slot = int(frame)
                view = pool.view(slot, 1000)
                channel.send(b"%d %d" % (slot, view.sum()))
                view *= 2
except WorkerDied:
    print("parent is gone", flush=True)
"""


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, fd = Channel.pair()
    theirs = Channel.from_fd(fd)
    yield ours, theirs
    ours.close()
    theirs.close()


def start_child(fd: int) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(fd)], pass_fds=(fd,), stdout=subprocess.PIPE)
    os.close(fd)
    return child


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def receive_all(channel: Channel, count: int, sender: Channel) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        got = channel.receive(0.0)
        frames += got
        sender.flush()
    return frames


def test_two_mappings_of_a_region_are_one_memory() -> None:
    region = Region.create(4096)
    other = Region.attach(os.dup(region.fd), 4096)
    region.array(64, 3)[:] = [1, 2, 3]
    assert other.array(64, 3).tolist() == [1, 2, 3]
    region.close()
    other.array(64, 1)[0] = 7
    assert other.array(64, 2).tolist() == [7, 2]
    other.close()


def test_a_region_starts_as_zeros_and_has_arrays_of_any_type_and_size() -> None:
    region = Region.create(100)
    assert not region.array(0, 100, np.uint8).any()
    assert region.array(100, 0).shape == (0,)
    assert region.array(0, 12, np.int64).nbytes == 96
    region.close()


def test_an_array_outside_its_region_is_refused() -> None:
    region = Region.create(100)
    for offset, numel in ((0, 26), (100, 1), (-4, 1), (2, 1)):
        with pytest.raises(AssertionError):
            region.array(offset, numel)
    region.close()


def test_a_view_outlives_the_region_it_was_taken_from() -> None:
    region = Region.create(4096)
    view = region.array(0, 10)
    region.close()
    region.close()
    view[:] = 5
    assert view.sum() == 50


def test_a_region_shorter_than_announced_is_refused() -> None:
    region = Region.create(100)
    with pytest.raises(PayloadError, match="5000 bytes was announced, its file has 100"):
        Region.attach(region.fd, 5000)
    region.close()


def test_memory_that_cannot_be_had_is_reported() -> None:
    with pytest.raises(ConfigError, match="bytes of shared memory cannot be had"):
        Region.create(1 << 60)


def test_nobody_can_shrink_a_region() -> None:
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    region.close()


def test_a_slot_is_out_once_until_it_is_given_back() -> None:
    region = Region.create(SlotPool.bytes_needed(2, 10))
    pool = SlotPool(region, 2, 10)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1}
    assert pool.take() is None
    pool.give(first)
    assert pool.take() == first
    region.close()


def test_giving_a_slot_twice_is_a_bug_that_is_noticed() -> None:
    region = Region.create(SlotPool.bytes_needed(2, 10))
    pool = SlotPool(region, 2, 10)
    slot = pool.take()
    pool.give(slot)
    with pytest.raises(AssertionError, match="not taken"):
        pool.give(slot)
    region.close()


def test_slots_do_not_overlap_and_the_other_side_sees_them() -> None:
    region = Region.create(128 + SlotPool.bytes_needed(3, 10))
    home = SlotPool(region, 3, 10, offset=128)
    away = SlotPool(region, 3, 10, offset=128, home=False)
    for slot in range(3):
        home.view(slot, 10)[:] = slot + 1
    assert [away.view(slot, 10).tolist() for slot in range(3)] == [[1.0] * 10, [2.0] * 10, [3.0] * 10]
    assert not region.array(0, 32).any()
    with pytest.raises(AssertionError):
        away.take()
    with pytest.raises(AssertionError):
        home.view(0, 11)
    region.close()


def test_a_pool_of_empty_slots_works() -> None:
    region = Region.create(64)
    pool = SlotPool(region, 2, 0)
    assert pool.view(pool.take(), 0).shape == (0,)
    region.close()


def test_frames_arrive_whole_and_in_order(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    sent = [b"", b"a", bytes(1000), b"b" * FRAME_BYTES_MAX, b"end"]
    for frame in sent:
        ours.send(frame)
    assert receive_all(theirs, len(sent), ours) == sent


def test_send_never_blocks_and_keeps_what_the_kernel_cannot_take(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    sent = [index.to_bytes(4, "little") * 50_000 for index in range(40)]  # 8 MB, far above a socket buffer
    for frame in sent:
        ours.send(frame)
    assert ours.unsent
    assert receive_all(theirs, len(sent), ours) == sent
    assert not ours.unsent


def test_receive_sends_what_was_kept(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    sent = [bytes([index]) * 200_000 for index in range(20)]
    for frame in sent:
        ours.send(frame)
    frames: list[bytes] = []
    while len(frames) < len(sent):
        frames += theirs.receive()
        assert ours.receive() == []
    assert frames == sent


def test_nothing_there_is_an_empty_list(channels: tuple[Channel, Channel]) -> None:
    ours, _ = channels
    assert ours.receive() == []
    assert ours.receive(0.01) == []


def test_descriptors_travel_with_their_frames(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    before = open_descriptors()
    regions = [Region.create(4096) for _ in range(3)]
    for index, region in enumerate(regions):
        region.array(0, 1)[0] = index
    ours.send(b"x" * FRAME_BYTES_MAX)  # fills the kernel's buffer, so that what follows has to wait here
    ours.send(b"two", [regions[0].fd, regions[1].fd])
    ours.send(b"none")
    ours.send(b"one", [regions[2].fd])
    for region in regions:
        region.close()
    frames = receive_all(theirs, 4, ours)
    assert frames[1:] == [b"two", b"none", b"one"]
    attached = [Region.attach(theirs.descriptors.popleft(), 4096) for _ in range(3)]
    assert [region.array(0, 1)[0] for region in attached] == [0, 1, 2]
    assert not any(os.get_inheritable(region.fd) for region in attached)
    for region in attached:
        region.close()
    assert open_descriptors() == before


def test_closing_a_channel_leaks_no_descriptor() -> None:
    before = open_descriptors()
    region = Region.create(64)
    ours, fd = Channel.pair()
    theirs = Channel.from_fd(fd)
    ours.send(b"arrives", [region.fd])
    assert theirs.receive(DEADLINE_S) == [b"arrives"]
    for _ in range(8):
        ours.send(b"x" * FRAME_BYTES_MAX, [region.fd])
    for channel in (ours, theirs, ours):
        channel.close()
    region.close()
    assert open_descriptors() == before


def test_too_many_open_files_is_an_error_and_not_a_lost_descriptor(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    region = Region.create(64)
    ours.send(b"frame", [region.fd])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(TransportError, match="too many open files"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        region.close()


def test_last_words_are_delivered_before_death_is_reported(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    ours.send(b"unread")  # a death with unread frames resets the connection
    theirs.send(b"last")
    theirs.send(b"words")
    theirs.close()
    with pytest.raises(WorkerDied):
        ours.send(b"too late")
    assert ours.receive(DEADLINE_S) == [b"last", b"words"]
    with pytest.raises(WorkerDied):
        ours.receive(DEADLINE_S)


def test_half_a_frame_of_a_dead_sender_is_not_delivered() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    theirs.sendall((100).to_bytes(4, "little") + b"\0" + bytes(50))
    theirs.close()
    with pytest.raises(WorkerDied):
        channel.receive(DEADLINE_S)
    channel.close()


def test_a_frame_above_the_limit_is_refused_before_it_is_stored() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    theirs.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"\0")
    with pytest.raises(PayloadError, match="the limit is 1048576"):
        channel.receive(DEADLINE_S)
    with pytest.raises(AssertionError):
        channel.send(bytes(FRAME_BYTES_MAX + 1))
    channel.close()
    theirs.close()


def test_two_processes_pass_slots_through_a_channel() -> None:
    region = Region.create(SlotPool.bytes_needed(2, 1000))
    pool = SlotPool(region, 2, 1000)
    channel, fd = Channel.pair()
    with start_child(fd) as child:
        channel.send(b"%d" % region.nbytes, [region.fd])
        for value in (1, 2, 3):
            slot = pool.take()
            pool.view(slot, 1000)[:] = value
            channel.send(b"%d" % slot)
            assert channel.receive(DEADLINE_S) == [b"%d %d" % (slot, 1000 * value)]
            pool.give(slot)
        channel.close()
        assert child.stdout.read() == b"parent is gone\n"
        assert child.wait(DEADLINE_S) == 0
    region.close()


def test_a_killed_process_is_noticed_and_leaves_nothing_behind() -> None:
    shared_files_before = set(os.listdir("/dev/shm"))
    region = Region.create(SlotPool.bytes_needed(2, 1000))
    channel, fd = Channel.pair()
    with start_child(fd) as child:
        channel.send(b"%d" % region.nbytes, [region.fd])
        channel.send(b"0")
        assert channel.receive(DEADLINE_S) == [b"0 0"]
        child.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerDied):
            channel.receive(DEADLINE_S)
    assert region.array(0, 1)[0] == 0
    region.close()
    channel.close()
    new_files = set(os.listdir("/dev/shm")) - shared_files_before
    assert not [name for name in new_files if "archipel" in name]
