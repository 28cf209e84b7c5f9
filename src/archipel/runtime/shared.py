"""Memory and messages between a trainer process and the courier process beside it.

DESIGN.md section 1: the trainer puts snapshots into shared memory, the courier moves them over the network,
and a step of training never waits for either. Bulk lies in a `Region`; small frames that say what lies where
go through a `Channel`; a `SlotPool` says which pieces of a region are free.

Invariants: a region has no name, so that nothing is left behind however its processes end. A channel keeps
order, never blocks its sender and reports the death of the other end. A slot has one owner at a time;
ownership passes with a frame, and the socket that carries the frame orders the memory accesses on both sides.
"""

import array
import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from archipel.errors import ConfigError, PayloadError, TransportError, WorkerDied

FRAME_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 16  # per frame; the kernel allows 253
ALIGNMENT = 64  # bytes: slots start on cache lines

_HEADER = struct.Struct("<IB")  # length of the frame in bytes, number of descriptors sent with it
_RECEIVE_BYTES = 1 << 18
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN)


class Region:
    """Anonymous memory that processes share by passing its descriptor; gone when the last of them is."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map an open file. Takes over `fd`. Use `create` or `attach`."""
        self.fd = fd
        self.nbytes = nbytes
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> "Region":
        """Return a region of zeros. The memory is claimed now: lacking it is a ConfigError, not a SIGBUS."""
        assert nbytes > 0, nbytes
        fd = _unnamed_file()
        try:
            # Asked for too much, the kernel would claim page after page until it has to kill somebody.
            if nbytes > (available := _available_bytes()):
                raise OSError(errno.ENOMEM, f"{available} bytes are available")
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
            _fix_size(fd)
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{nbytes} bytes of shared memory cannot be had: {error}; "
                "use a smaller model or more fragments, or raise the memory limit"
            ) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> "Region":
        """Map a region that another process created. Takes over `fd`."""
        size = os.fstat(fd).st_size
        if size < nbytes:
            # Touching a page beyond the end would kill the process with SIGBUS, without a word.
            raise PayloadError(f"a shared region of {nbytes} bytes was announced, its file has {size}")
        return cls(fd, nbytes)

    def array(self, offset: int, numel: int, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Return a writable flat view of `numel` elements from byte `offset`. It keeps the memory alive."""
        kind = np.dtype(dtype)
        assert self._map is not None, "the region is closed"
        assert offset % kind.itemsize == 0, (offset, kind)
        assert offset >= 0 and numel >= 0 and offset + numel * kind.itemsize <= self.nbytes, (offset, numel)
        return np.frombuffer(self._map, kind, numel, offset)

    def close(self) -> None:
        """Let go of the descriptor and, once no view is left, of the memory. Twice is once."""
        if self._map is None:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):  # views still use it: the last of them unmaps it
            self._map.close()
        self._map = None


class SlotPool:
    """Equal float32 slots in a region, each free or taken.

    The process that created the pool is its home: it takes slots, names them in frames, and gives them back
    when a frame says that the other side is through. The other side opens the same pool with `home=False` and
    only views.
    """

    def __init__(
        self, region: Region, slots: int, slot_numel: int, *, offset: int = 0, home: bool = True
    ) -> None:
        """Lay `slots` slots of `slot_numel` float32 from byte `offset`, a multiple of ALIGNMENT."""
        assert offset % ALIGNMENT == 0, offset
        assert offset + self.bytes_needed(slots, slot_numel) <= region.nbytes, (offset, slots, slot_numel)
        self.slots = slots
        self.slot_numel = slot_numel
        self._region = region
        self._offset = offset
        self._home = home
        self._free = deque(range(slots)) if home else deque()
        self._taken: set[int] = set()

    @staticmethod
    def bytes_needed(slots: int, slot_numel: int) -> int:
        """Return the bytes a pool occupies in its region."""
        return slots * _slot_bytes(slot_numel)

    @property
    def free(self) -> int:
        """How many slots `take` can still hand out."""
        return len(self._free)

    def take(self) -> int | None:
        """Return a slot that nobody uses, the longest free one first, or None."""
        assert self._home, "only the home side of a pool takes slots"
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Make a taken slot free again."""
        assert self._home, "only the home side of a pool frees slots"
        assert slot in self._taken, f"slot {slot} is not taken"
        self._taken.remove(slot)
        self._free.append(slot)

    def view(self, slot: int, numel: int) -> np.ndarray:
        """Return the first `numel` float32 of a slot that the caller owns at this moment."""
        assert 0 <= slot < self.slots, slot
        assert 0 <= numel <= self.slot_numel, (numel, self.slot_numel)
        return self._region.array(self._offset + slot * _slot_bytes(self.slot_numel), numel)


class Channel:
    """Frames of bytes, and descriptors with them, between two processes. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Wrap one end of a Unix stream pair. Use `pair` or `from_fd`."""
        sock.setblocking(False)
        self.descriptors: deque[int] = deque()  # received with frames, in order; whoever pops one owns it
        self._socket = sock
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()  # what the kernel did not take yet
        self._inbox = bytearray()
        self._counted = 0  # descriptors promised by the frames already handed out or parsed
        self._arrived = 0  # descriptors that came
        self._ended = False

    @classmethod
    def pair(cls) -> tuple["Channel", int]:
        """Return our end, and the descriptor for the child: close ours of it once the child is started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs.detach()

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """Take over the inherited end of a pair; no further child of this process will inherit it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor to poll: for reading, and for writing while `unsent`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether frames wait here for room in the kernel."""
        return bool(self._outbox)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame of at most 1 MiB, with descriptors; never block, keep order.

        What the kernel has no room for is kept and goes out with the next `send`, `flush` or `receive`. The
        caller keeps its `fds`. Raises WorkerDied when the other end is gone; what it sent before can still be
        received.
        """
        assert len(frame) <= FRAME_BYTES_MAX, len(frame)
        assert len(fds) <= DESCRIPTORS_MAX, len(fds)
        whole = memoryview(_HEADER.pack(len(frame), len(fds)) + frame)
        self._outbox.append((whole, [os.dup(fd) for fd in fds]))
        self.flush()

    def flush(self) -> None:
        """Hand the kernel as much as it takes now. Raises WorkerDied when the other end is gone."""
        while self._outbox:
            rest, fds = self._outbox[0]
            try:
                sent = self._send_some(rest, fds)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE:
                    raise WorkerDied("the process at the other end of the channel is gone") from error
                raise
            for fd in fds:  # they went with the first byte
                os.close(fd)
            self._outbox.popleft()
            if sent < len(rest):
                self._outbox.appendleft((rest[sent:], []))

    def receive(self, timeout_s: float = 0.0) -> list[bytes]:
        """Return every whole frame that is here; if there is none, wait up to `timeout_s` for the first.

        The descriptors of a returned frame are in `descriptors`, in the order of the frames. Raises
        WorkerDied when the other end is gone and everything it sent has been returned.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._flush_quietly()
            self._drain()
            if frames := self._whole_frames():
                return frames
            if self._ended:
                raise WorkerDied("the process at the other end of the channel is gone")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return []
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poll.poll(left_s * 1000)

    def close(self) -> None:
        """Close our end, and every descriptor that was not passed on or picked up. Twice is once."""
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        for fd in self.descriptors:
            os.close(fd)
        self._outbox.clear()
        self.descriptors.clear()
        self._socket.close()

    def _send_some(self, data: memoryview, fds: list[int]) -> int:
        if not fds:
            return self._socket.send(data, _no_signal())
        return socket.send_fds(self._socket, [data], fds, _no_signal())

    def _flush_quietly(self) -> None:
        # A death is reported by the read side, after the last words have been delivered.
        with contextlib.suppress(WorkerDied):
            self.flush()

    def _drain(self) -> None:
        """Move what the kernel holds into the inbox, until that surely holds a whole frame."""
        space = socket.CMSG_SPACE(array.array("i").itemsize * DESCRIPTORS_MAX)
        while not self._ended and len(self._inbox) <= FRAME_BYTES_MAX + _HEADER.size:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(_RECEIVE_BYTES, space, _close_on_exec())
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                data, ancillary, flags = b"", [], 0
            self._keep_descriptors(ancillary, flags)
            self._ended = not data
            self._inbox += data

    def _keep_descriptors(self, ancillary: list[Any], flags: int) -> None:
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                for fd in received:
                    os.set_inheritable(fd, False)
                self.descriptors.extend(received)
                self._arrived += len(received)
        if flags & socket.MSG_CTRUNC:
            raise TransportError("a descriptor could not be received: too many open files; raise `ulimit -n`")

    def _whole_frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._inbox) - start >= _HEADER.size:
            length, descriptors = _HEADER.unpack_from(self._inbox, start)
            if length > FRAME_BYTES_MAX:
                raise PayloadError(f"a frame of {length} bytes was announced; the limit is {FRAME_BYTES_MAX}")
            end = start + _HEADER.size + length
            if len(self._inbox) < end:
                break
            frames.append(bytes(self._inbox[start + _HEADER.size : end]))
            self._counted += descriptors
            start = end
        del self._inbox[:start]
        assert self._counted <= self._arrived, "a frame came without its descriptors"
        return frames


def _slot_bytes(slot_numel: int) -> int:
    return -(-slot_numel * 4 // ALIGNMENT) * ALIGNMENT


def _available_bytes() -> int:
    """Return the memory that can be had without swapping; where that is unknown, all the machine has."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _unnamed_file() -> int:
    """Return a descriptor of a file in memory that has no name, or of a temporary file already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("archipel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, name = tempfile.mkstemp(prefix="archipel-")
    os.unlink(name)
    return fd


def _fix_size(fd: int) -> None:
    """Let nobody who holds the descriptor shrink the file under our feet."""
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _no_signal() -> int:
    return getattr(socket, "MSG_NOSIGNAL", 0)


def _close_on_exec() -> int:
    return getattr(socket, "MSG_CMSG_CLOEXEC", 0)
