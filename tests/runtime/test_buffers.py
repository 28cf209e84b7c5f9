"""Buffers come back by themselves, and never while anybody can still see them."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from archipel.runtime.buffers import Buffers, mapped, size_class

LENGTH = 100_000


def address(buffer: np.ndarray) -> int:
    return buffer.__array_interface__["data"][0]


def test_a_buffer_nobody_refers_to_is_given_again():
    buffers = Buffers(kept=1)
    first = buffers.take(LENGTH)
    at = address(first)
    del first
    assert buffers.unused == 1
    assert address(buffers.take(LENGTH)) == at


@pytest.mark.parametrize(
    "view",
    [
        lambda buffer: buffer[10:20],
        lambda buffer: buffer.view(np.float32)[3:].reshape(-1)[1:],
        lambda buffer: memoryview(buffer).cast("B")[5:],
        lambda buffer: np.frombuffer(memoryview(buffer)[4:], np.float32, 2)[1:],
    ],
    ids=["slice", "view of a view", "memoryview", "array over a memoryview"],
)
def test_a_view_keeps_its_buffer(view):
    buffers = Buffers(kept=1)
    kept = view(buffers.take(LENGTH))
    gc.collect()
    assert buffers.unused == 0
    del kept
    assert buffers.unused == 1


@pytest.mark.parametrize("size", [4096, 3 << 20])
def test_mapped_memory_goes_back_to_the_system(size):
    start = address(block := mapped(size))
    block[:] = 7
    assert block.sum() == 7 * size
    assert in_use(start)
    del block
    assert not in_use(start)


def in_use(at: int) -> bool:
    """Return whether an address is mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= at < last for first, last in spans)


def test_a_tensor_keeps_its_buffer():
    torch = pytest.importorskip("torch")
    buffers = Buffers(kept=1)
    kept = torch.from_numpy(buffers.floats(LENGTH))[5:].numpy()
    gc.collect()
    assert buffers.unused == 0
    del kept
    assert buffers.unused == 1


def test_no_more_than_kept_are_held():
    buffers = Buffers(kept=2)
    taken = [buffers.take(LENGTH) for _ in range(5)]
    assert len({address(buffer) for buffer in taken}) == 5
    taken.clear()
    assert buffers.unused == 2


def test_fragments_of_nearly_one_length_share_a_buffer():
    buffers = Buffers(kept=1)
    at = address(buffers.take(size_class(LENGTH)))
    assert address(buffers.take(size_class(LENGTH) - 1)) == at


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 64 << 20, (64 << 20) + 1, 3 * 10**9])
def test_a_size_class_is_at_most_an_eighth_longer(length):
    size = size_class(length)
    assert length <= size <= max(length + length // 8, length + 4096)
    assert size_class(size) == size


def test_an_empty_buffer_is_one():
    assert Buffers(kept=1).take(0).nbytes == 0
    assert Buffers(kept=1).floats(0).shape == (0,)


def test_threads_never_share_a_buffer():
    buffers, clashes = Buffers(kept=8), []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = buffers.take(8192)
            buffer[:] = mark
            if (buffer != mark).any():
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
