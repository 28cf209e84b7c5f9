"""Flat float32 buffers to bytes and back: what travels between workers (Decoupled DiLoCo, appendix D.3).

    codec     bytes an element   values
    float32   4                  as they are
    bf16      2                  rounded to nearest, ties to even
    int8      1 + 4/block        peak · k/127, k = −127 … 127
    int4      1/2 + 4/block      peak · k/7, k = −7 … 7
    e3m0      1/2 + 4/block      0 and ± peak · 2^−k, k = 0 … 6 (Streaming DiLoCo's 4-bit float)

The last three share a peak, the block's largest magnitude, among `block` elements. The paper names no scheme, this one
is ours. Storing the peak rather than the step makes zero, constant and one-element blocks exact and leaves no scale to
overflow or underflow. Layout, little-endian: the float32 peaks, then the codes. int4 and e3m0 put the first half of a
block into the low four bits of its bytes and the second half into the high four, so that both halves are contiguous.

Invariants: finite values decode to finite values, zero to zero. A block with a NaN or an infinity gets the peak NaN,
which `decode` refuses; float32 and bf16 carry such values through, for whoever merges them to refuse (`finite`).
numpy and numba give the same bits. No torch here: couriers import this file.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from archipel.errors import ConfigError, PayloadError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LEVELS = {"int8": 127, "int4": 7, "e3m0": 0}  # largest integer code; e3m0 has none
CHUNK = 1 << 15  # elements handled at once: their temporaries stay in the second-level cache
INFINITY_BITS = 0x7F800000  # of float32; magnitudes at or above are Inf and NaN
E3M0_EDGES = np.array([2.0**-7] + [1.5 * 2.0**k for k in range(-6, 0)], np.float32)  # midpoints of neighbours


def encoded_bytes(name: str, numel: int, block: int) -> int:
    """Return the exact length of a payload. Raises PayloadError for an unknown codec, ConfigError for the block."""
    if name == "float32":
        return 4 * numel
    if name == "bf16":
        return 2 * numel
    if name not in LEVELS:
        raise PayloadError(f"unknown codec {name!r}: use float32, bf16, int8, int4 or e3m0")
    if block < 2 or block % 2:
        raise ConfigError(f"sync.codec_block={block} must be even and at least 2: codes are packed in pairs; use 128")
    return 4 * -(-numel // block) + (numel if name == "int8" else -(-numel // 2))


def encode(
    name: str, values: Floats, block: int, out: Bytes | None = None, *, compiled: bool | None = None
) -> Bytes:
    """Return the payload of values (numel,), in `out` if given (of exactly `encoded_bytes`).

    compiled: numba (True), numpy (False) or numba where it is installed (None); the bytes are the same.
    """
    payload = _room(name, values, block, out)
    for start, stop in _chunks(values.size, block):
        _encode_chunk(name, values[start:stop], (start, values.size, block), payload, compiled)
    return payload


def encode_difference(
    name: str,
    base: Floats,
    local: Floats,
    block: int,
    out: Bytes | None = None,
    *,
    residual: Floats | None = None,
    compiled: bool | None = None,
) -> Bytes:
    """Return the payload of the outer gradient `base − local`, without a temporary of full size.

    residual (numel,): error feedback. It is added to the difference before coding and overwritten with what the codec
    lost, to be added to the next push of the same fragment. Non-finite losses are kept as 0.
    """
    assert base.shape == local.shape, (base.shape, local.shape)
    assert residual is None or residual.shape == base.shape
    payload = _room(name, base, block, out)
    buffer, decoded = np.empty(_span(block), np.float32), np.empty(_span(block), np.float32)
    for start, stop in _chunks(base.size, block):
        place = (start, base.size, block)
        difference = buffer[: stop - start]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(base[start:stop], local[start:stop], out=difference)
            if residual is not None:
                difference += residual[start:stop]
        _encode_chunk(name, difference, place, payload, compiled)
        if residual is not None:
            lost = residual[start:stop]
            with np.errstate(invalid="ignore"):
                np.subtract(difference, _decode_chunk(name, payload, place, decoded[: stop - start], compiled), out=lost)
            lost[~np.isfinite(lost)] = 0.0
    return payload


def decode(
    name: str,
    payload: Any,
    numel: int,
    block: int,
    out: Floats | None = None,
    *,
    compiled: bool | None = None,
) -> Floats:
    """Return the values (numel,) of a payload (any buffer of bytes), in `out` if given.

    Raises PayloadError, with `out` untouched, for a wrong length, an unknown codec or a peak that is not a finite
    magnitude. float32 and bf16 payloads may hold NaN and Inf: ask `finite`.
    """
    data = np.frombuffer(payload, np.uint8)
    expected = encoded_bytes(name, numel, block)
    if data.size != expected:
        raise PayloadError(
            f"a {name} payload of {numel} values takes {expected} bytes, got {data.size}: "
            "the sender's fragment or codec settings differ"
        )
    if name in LEVELS:
        _check_peaks(name, data, -(-numel // block))
    values = np.empty(numel, np.float32) if out is None else out
    assert values.shape == (numel,) and values.dtype == np.float32 and values.flags.c_contiguous
    for start, stop in _chunks(numel, block):
        _decode_chunk(name, data, (start, numel, block), values[start:stop], compiled)
    return values


def finite(values: Floats) -> bool:
    """Return whether no value (numel,) is NaN or infinite, without a temporary of full size."""
    with np.errstate(invalid="ignore"):
        return values.size == 0 or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def round_to_bf16(values: Floats) -> Floats:
    """Return float32 values as a bf16 model would hold them: to nearest, ties to even, as torch casts.

    The base of a bf16 learner's outer gradient: measured from the float32 weights, the rounding of the learner's copy
    would count as training and pull the syncer back onto the bf16 grid. Unlike the codec it rounds to Inf beyond the
    largest bf16 value, as the learner's own copy does.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    codes = np.empty(flat.size, np.uint16)
    for start, stop in _chunks(flat.size, 2):
        _round_bf16_numpy(flat[start:stop], codes[start:stop], False)
    return (codes.astype(np.uint32) << 16).view(np.float32).reshape(np.shape(values))


def numba_present() -> bool:
    """Return whether the compiled kernels are in use where nothing else is asked for."""
    return _numba() is not None


def _room(name: str, values: Floats, block: int, out: Bytes | None) -> Bytes:
    size = encoded_bytes(name, values.size, block)
    assert values.ndim == 1 and values.dtype == np.float32 and values.flags.c_contiguous, values.dtype
    if out is None:
        return np.empty(size, np.uint8)
    assert out.shape == (size,) and out.dtype == np.uint8 and out.flags.c_contiguous, (out.shape, size)
    return out


def _span(block: int) -> int:
    return max(CHUNK // block, 1) * block


def _chunks(numel: int, block: int) -> list[tuple[int, int]]:
    span = _span(max(block, 1))
    return [(start, min(start + span, numel)) for start in range(0, numel, span)]


def _check_peaks(name: str, data: Bytes, blocks: int) -> None:
    peaks = data[: 4 * blocks].view("<f4")
    if blocks and not (float(peaks.min()) >= 0.0 and float(peaks.max()) < np.inf):  # a NaN fails both
        raise PayloadError(f"a {name} payload has a peak that is not a finite magnitude: the sender's values diverged")


def _parts(payload: Bytes, place: tuple[int, int, int], count: int, per_byte: int) -> tuple[Bytes, Bytes]:
    """Return the bytes of the peaks and of the codes of the `count` elements from `place` = (start, numel, block)."""
    start, numel, block = place
    head, first = 4 * -(-numel // block), start // block
    peaks = payload[4 * first : 4 * (first + -(-count // block))]
    at = head + start // per_byte
    return peaks, payload[at : at + -(-count // per_byte)]


def _encode_chunk(
    name: str, values: Floats, place: tuple[int, int, int], payload: Bytes, compiled: bool | None
) -> None:
    start, _, block = place
    if name == "float32":
        payload[4 * start : 4 * (start + values.size)] = values.astype("<f4", copy=False).view(np.uint8)
        return
    if name == "bf16":
        codes = np.empty(values.size, "<u2")
        _kernel("round_bf16", compiled)(values, codes, True)
        payload[2 * start : 2 * (start + values.size)] = codes.view(np.uint8)
        return
    peak_bytes, codes = _parts(payload, place, values.size, 1 if name == "int8" else 2)
    peaks = np.empty(peak_bytes.size // 4, "<f4")
    if name == "int8":
        _kernel("encode_int8", compiled)(values, block, peaks, codes.view(np.int8))
    else:
        _kernel("encode_" + name, compiled)(values, block, peaks, codes)
    peak_bytes[:] = peaks.view(np.uint8)


def _decode_chunk(
    name: str, payload: Bytes, place: tuple[int, int, int], out: Floats, compiled: bool | None
) -> Floats:
    start, _, block = place
    if name == "float32":
        out[:] = payload[4 * start : 4 * (start + out.size)].view("<f4")
        return out
    if name == "bf16":
        np.left_shift(payload[2 * start : 2 * (start + out.size)].view("<u2"), 16, out=out.view(np.uint32))
        return out
    peak_bytes, codes = _parts(payload, place, out.size, 1 if name == "int8" else 2)
    peaks = np.array(peak_bytes.view("<f4"))  # a copy: the payload may lie at any address
    if name == "int8":
        _kernel("decode_int8", compiled)(codes.view(np.int8), block, peaks, out)
    else:
        _kernel("decode_nibbles", compiled)(codes, block, peaks, _fractions(name), out)
    return out


@functools.cache
def _fractions(name: str) -> Floats:
    """Return the sixteen values a four-bit code stands for, in units of the peak."""
    if name == "int4":
        signed = np.array([*range(8), -7, *range(-7, 0)], np.float32)  # −8 is never written and reads as −7
        return signed / np.float32(7)
    powers = [0.0] + [2.0**k for k in range(-6, 1)]
    return np.array(powers + [-power for power in powers], np.float32) + np.float32(0)  # + 0: no −0
