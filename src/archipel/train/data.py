"""Batches for learners: a sharded, resumable stream over tokens or images, and fixed batches to validate on.

A batch is a pure function of (seed, shard, position), so that a learner that restarts goes on where it died,
and a replay reads what the run read. `position` counts tokens drawn from a shard, whatever the batch size
was: it may change at any time. A token is a token of text; of images a token is one image, and a window holds
one.

Tokens are cut into N windows: with sequence S, window w has tokens w·S … w·S+S−1 as inputs and the next ones
as targets; what fills no window at the end is never read. All shards walk one circle of the N windows,
shuffled by a permutation written down in this file, and start at different places, 1/shards of the circle
apart. So

* shards that have drawn equally much never share a window, and when each has walked to the next one's start,
  every window was read exactly once, whether or not N divides by the shards (stretches then differ by one);
* one shard alone reads all N windows before it repeats any; its next lap has a new permutation.

Starts are handed out by bit reversal (of 64: 0, 32, 16, 48, …): the fewer shards are in use, the longer they
stay apart. Workers of one run must agree on seed, sequence and shards, and the data's digest: these define
the windows.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from archipel.errors import DataError
from archipel.train.corpus import TokenHeader, default_corpus, open_tokens, tokenizer_digest
from archipel.train.models import Batch
from archipel.train.options import DataOptions, check

ROUNDS = 6  # of the Feistel network, an even number; four are enough for strong round functions
JOURNAL = struct.Struct("<qqq")
POSITION_MAX = 2**53  # no journal of ours holds more; a syncer takes no more


def mixed(value: np.ndarray) -> np.ndarray:
    """Return uint64 values scrambled one to one (the finaliser of SplitMix64); arithmetic is modulo 2⁶⁴."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permuted(indices: np.ndarray, count: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the places of `indices` in the permutation of 0 … count−1 that `key` names.

    A Feistel network permutes the next power of two; a value that lands outside walks on until it is inside,
    and it stays a permutation. No library's generator: they change between versions, this may not.
    """
    bits = max(2, (count - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << bits // 2) - 1)
    keys = [_round_key(key, number) for number in range(ROUNDS)]
    values = np.array(indices, dtype=np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        high, low = values[outside] >> low_bits, values[outside] & masks[1]
        for number, round_key in enumerate(keys):  # the halves trade places; an even number brings them back
            high, low = low, high ^ (mixed(low + round_key) & masks[number % 2])
        values[outside] = (high << low_bits) | low
        outside = outside[values[outside] >= np.uint64(count)]
    return values.astype(np.int64)


def _round_key(key: tuple[int, ...], number: int) -> np.uint64:
    """Return a 64-bit key; the hash of the text is the same on every machine."""
    return np.uint64(xxhash.xxh3_64_intdigest(repr((*map(int, key), number)).encode()))


def starting_order(shards: int) -> list[int]:
    """Return which part of the circle each shard starts at: 0…shards−1 by reversed bits."""
    bits = max(1, (shards - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [part for part in reversed_bits if part < shards]


class Walk:
    """The windows of one shard, by how many were drawn before."""

    def __init__(self, windows: int, *, seed: int, shard: int, shards: int) -> None:
        if not 0 <= shard < shards:
            raise DataError(f"shard {shard} is out of range: data.shards={shards} allows 0 to {shards - 1}")
        if windows < shards:
            raise DataError(
                f"the training data has {windows} windows, fewer than data.shards={shards}: "
                "use fewer shards, a shorter data.sequence or more text"
            )
        self._windows, self._seed = windows, seed
        self._start = starting_order(shards)[shard] * windows // shards

    def windows(self, drawn: int, count: int) -> np.ndarray:
        """Return `count` windows (int64) after the first `drawn`."""
        numbers = np.arange(drawn, drawn + count, dtype=np.int64)
        laps, places = np.divmod(numbers, self._windows)
        places = (places + self._start) % self._windows
        chosen = np.empty_like(numbers)
        for lap in range(int(laps[0]), int(laps[-1]) + 1) if count else ():
            here = laps == lap
            chosen[here] = permuted(places[here], self._windows, (self._seed, lap))
        return chosen


class JournalEntry(NamedTuple):
    """What a stream had drawn when it last wrote its journal."""

    shard: int
    position: int  # tokens of the shard, earlier incarnations included
    consumed: int  # tokens of this incarnation


class Journal:
    """Three 8-byte numbers in a memory-mapped file: they survive a death of the process, not of the machine.

    After a machine's death the file is there whole, with some position between the first and the last.
    Position is written before consumed. A process killed between the two never returned that batch; its
    tokens are skipped by whoever goes on from the position, and counted by nobody.
    """

    def __init__(self, path: Path | str, shard: int, position: int) -> None:
        path = Path(path)
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w+b") as file:
                file.write(JOURNAL.pack(shard, position, 0))
                file.flush()
                os.fsync(file.fileno())  # a name that outlives a power failure must not be of an empty file
                self._map = mmap.mmap(file.fileno(), JOURNAL.size)
            temporary.replace(path)
        except OSError as error:
            raise DataError(f"cannot write the data journal {path}: {error}") from error
        self._numbers = np.frombuffer(self._map, dtype="<i8")  # aligned: each store is whole or absent

    def write(self, position: int, consumed: int) -> None:
        """Note what is about to be returned."""
        self._numbers[1] = position
        self._numbers[2] = consumed


def read_journal(path: Path | str) -> JournalEntry:
    """Return what a stream, alive or dead, has noted. Raises DataError if there is no journal to read."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the data journal {path}: {error}") from error
    if len(raw) != JOURNAL.size:
        raise DataError(
            f"{path} holds {len(raw)} bytes, a data journal holds {JOURNAL.size}: it is something else"
        )
    entry = JournalEntry(*JOURNAL.unpack(raw))
    if entry.shard < 0 or not 0 <= entry.consumed <= entry.position < POSITION_MAX:
        raise DataError(f"{path} holds {tuple(entry)}, which no data stream notes: it is damaged; remove it")
    return entry


class Cursor:
    """Where a stream stands: the position in its shard, and what this object drew, counted apart."""

    def __init__(
        self, walk: Walk, shard: int, tokens_per_window: int, position: int, journal: Path | None
    ) -> None:
        if position < 0:
            raise DataError(f"position {position} is negative: a position counts tokens drawn, from 0")
        self._walk, self._size = walk, tokens_per_window
        # Of a position inside a window (the sequence length was another then) the rest is skipped, not
        # repeated.
        self._drawn = -(-position // tokens_per_window)
        self.consumed = 0
        self._journal = Journal(journal, shard, self.position) if journal else None

    @property
    def position(self) -> int:
        return self._drawn * self._size

    def draw(self, count: int) -> np.ndarray:
        """Return the next `count` windows, noted in the journal before they are returned."""
        if count < 1:
            raise DataError(f"a batch of {count} is empty: data.batch must be at least 1")
        windows = self._walk.windows(self._drawn, count)
        self._drawn += count
        self.consumed += windows.size * self._size
        if self._journal:
            self._journal.write(self.position, self.consumed)
        return windows


class TokenStream:
    """Endless batches of one shard of an array of tokens. `sequence` is the tokens a window counts for."""

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seed: int,
        shard: int,
        shards: int,
        sequence: int,
        position: int = 0,
        journal: Path | None = None,
    ) -> None:
        self._windows = windows_of(tokens, sequence)
        self.sequence = sequence
        walk = Walk(len(self._windows), seed=seed, shard=shard, shards=shards)
        self._cursor = Cursor(walk, shard, sequence, position, journal)

    @property
    def position(self) -> int:
        """Tokens of the shard drawn so far, the position it was opened at included."""
        return self._cursor.position

    @property
    def consumed(self) -> int:
        """Tokens this object has drawn."""
        return self._cursor.consumed

    def next(self, batch: int) -> Batch:
        """Return the next `batch` windows: inputs and targets, each (batch, sequence) int64."""
        return token_batch(self._windows, self._cursor.draw(batch))


class ImageStream:
    """Endless batches of one shard of labelled images; as TokenStream, with an image for a token."""

    sequence = 1

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        seed: int,
        shard: int,
        shards: int,
        position: int = 0,
        journal: Path | None = None,
    ) -> None:
        self._images, self._labels = images, labels
        walk = Walk(len(images), seed=seed, shard=shard, shards=shards)
        self._cursor = Cursor(walk, shard, 1, position, journal)

    @property
    def position(self) -> int:
        """Images of the shard drawn so far, the position it was opened at included."""
        return self._cursor.position

    @property
    def consumed(self) -> int:
        """Images this object has drawn."""
        return self._cursor.consumed

    def next(self, batch: int) -> Batch:
        """Return the next images (batch, channels, side, side) float32 and labels (batch,) int64."""
        return image_batch(self._images, self._labels, self._cursor.draw(batch))


def windows_of(tokens: np.ndarray, sequence: int) -> np.ndarray:
    """Return a view (windows, sequence + 1); a window's last token is the next one's first."""
    count = (len(tokens) - 1) // sequence
    if count < 1:
        raise DataError(
            f"{len(tokens)} tokens are fewer than one window of data.sequence={sequence} and a last target: "
            "use a shorter data.sequence or more text"
        )
    step = tokens.strides[0]
    return np.lib.stride_tricks.as_strided(
        tokens, (count, sequence + 1), (sequence * step, step), writeable=False
    )


def token_batch(windows: np.ndarray, chosen: np.ndarray) -> Batch:
    """Return the chosen windows as inputs and the targets one token later."""
    rows = windows[chosen].astype(np.int64)
    return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()))


def image_batch(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> Batch:
    """Return the chosen images and their labels."""
    return Batch(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen]))


def split(count: int, valid_fraction: float) -> int:
    """Return where validation begins: tokens (or images) from there on are never trained on.

    It does not depend on the sequence length, so that runs with different ones are validated on the same
    text.
    """
    return count - int(count * valid_fraction)


class TokenData:
    """A token file, opened for training and validation."""

    def __init__(self, options: DataOptions) -> None:
        self._options = options
        self.header, tokens = _open(options)
        border = split(len(tokens), options.valid_fraction)
        self._train, self._valid = tokens[:border], tokens[border:]

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer."""
        return self.header.vocabulary

    @property
    def digest(self) -> str:
        """What learners of one run should agree on."""
        return self.header.digest

    def stream(self, shard: int, position: int = 0, journal: Path | None = None) -> TokenStream:
        """Return the shard's stream from a position on."""
        options = self._options
        return TokenStream(
            self._train,
            seed=options.seed,
            shard=shard,
            shards=options.shards,
            sequence=options.sequence,
            position=position,
            journal=journal,
        )

    def validation(self, batches: int, batch: int) -> Iterator[Batch]:
        """Yield the same batches at every call, spread over the validation text; fewer if it is short."""
        windows = windows_of(self._valid, self._options.sequence)
        for chosen in _spread(len(windows), batches, batch):
            yield token_batch(windows, chosen)


class ImageData:
    """scikit-learn's digits: 1,797 images of 8 by 8 pixels in one channel, values 0…1, 10 classes."""

    def __init__(self, options: DataOptions) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError(
                "data.source=digits needs scikit-learn: pip install -e '.[images]' in a checkout"
            ) from error
        digits = load_digits()
        self._options = options
        self._images = (digits.images[:, None] / 16).astype(np.float32)  # (1797, 1, 8, 8)
        self._labels = digits.target.astype(np.int64)
        self._border = split(len(self._images), options.valid_fraction)
        self.digest = xxhash.xxh3_128_hexdigest(self._images.tobytes() + self._labels.tobytes())
        self.vocabulary = 10

    def stream(self, shard: int, position: int = 0, journal: Path | None = None) -> ImageStream:
        """Return the shard's stream from a position on."""
        options = self._options
        return ImageStream(
            self._images[: self._border],
            self._labels[: self._border],
            seed=options.seed,
            shard=shard,
            shards=options.shards,
            position=position,
            journal=journal,
        )

    def validation(self, batches: int, batch: int) -> Iterator[Batch]:
        """Yield the same batches at every call; fewer if there are not enough images."""
        images, labels = self._images[self._border :], self._labels[self._border :]
        for chosen in _spread(len(images), batches, batch):
            yield image_batch(images, labels, chosen)


def load(options: DataOptions) -> TokenData | ImageData:
    """Return the run's data. Raises ConfigError or DataError if options and files cannot be used."""
    check("data", options)
    return ImageData(options) if options.source == "digits" else TokenData(options)


def stream(
    options: DataOptions, shard: int, position: int = 0, journal: Path | None = None
) -> TokenStream | ImageStream:
    """Return a shard's stream of the run's data."""
    return load(options).stream(shard, position, journal)


def validation(options: DataOptions, batches: int, batch: int) -> Iterator[Batch]:
    """Yield the fixed validation batches of the run's data."""
    return load(options).validation(batches, batch)


def _open(options: DataOptions) -> tuple[TokenHeader, np.ndarray]:
    if not options.path:
        return _open_default(options)
    opened = open_tokens(options.path, verify=options.verify)
    if options.tokenizer and tokenizer_digest(options.tokenizer) != opened.header.tokenizer_digest:
        raise DataError(
            f"{options.path} was made with the tokenizer {opened.header.tokenizer}, not with "
            f"data.tokenizer={options.tokenizer}: prepare it again or leave data.tokenizer empty"
        )
    return opened


def _open_default(options: DataOptions) -> tuple[TokenHeader, np.ndarray]:
    """The default corpus is ours to make: a damaged one is made again."""
    tokenizer = options.tokenizer or "bytes"
    try:
        return open_tokens(default_corpus(options.cache, tokenizer), verify=options.verify)
    except DataError:
        return open_tokens(default_corpus(options.cache, tokenizer, again=True))


def _spread(available: int, batches: int, batch: int) -> Iterator[np.ndarray]:
    """Yield indices of up to batches · batch samples, evenly spread over those available."""
    if not available:
        raise DataError("there is no validation data: raise data.valid_fraction")
    wanted = min(batches * batch, available)
    chosen = np.arange(wanted) * available // wanted
    for first in range(0, wanted, batch):
        yield chosen[first : first + batch]
