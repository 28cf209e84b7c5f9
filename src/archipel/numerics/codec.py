"""Flat float32 buffers to bytes and back: what travels between workers (Decoupled DiLoCo, appendix D.3).

    codec     bytes an element   values
    float32   4                  as they are
    bf16      2                  rounded to nearest, ties to even
    int8      1 + 4/block        peak · k/127, k = −127 … 127
    int4      1/2 + 4/block      peak · k/7, k = −7 … 7
    e3m0      1/2 + 4/block      0 and ±peak · 2^−k, k = 0 … 6 (Streaming DiLoCo's 4-bit float)

The last three share a peak, the largest magnitude, among `block` elements. The paper names no scheme; this
one is ours. Storing the peak rather than the step between codes makes zero, constant and one-element blocks
exact and leaves no scale to overflow or underflow. Layout, little-endian: the float32 peaks, then the codes.
int4 and e3m0 put the first half of a block into the low four bits of its bytes and the second half into the
high four: both are contiguous.

Invariants: finite values decode to finite values, zero to zero. A block that holds a NaN or an infinity gets
the peak NaN, which `decode` refuses; float32 and bf16 carry such values through, for whoever merges them to
refuse (`finite`). numpy and numba give the same bits. No torch here: couriers import this file.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from archipel.errors import ConfigError, PayloadError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Place = tuple[int, int, int]  # a chunk's first element, the payload's elements, elements per block

SCALED = ("int8", "int4", "e3m0")
CHUNK = 1 << 15  # elements handled at once, so that temporaries stay in the second-level cache
MAGNITUDE = np.int32(0x7FFFFFFF)  # bits of a float32 without its sign: they sort as the magnitudes do
INFINITE = np.int32(0x7F800000)  # magnitude bits from here on are Inf and NaN
NAN = np.int32(0x7FC00000)
HALF_BF16 = np.int32(0x7FFF)  # half of the last bf16 place, less one: the tie bit decides
SEVEN, LEVELS_INT8 = np.float32(7), np.float32(127)
# Midpoints between neighbours of the values 0, 2^-6, 2^-5 … 1 of e3m0.
EDGES = np.array([2.0**-7] + [1.5 * 2.0**k for k in range(-6, 0)], np.float32)
# What a code of e3m0 stands for, in peaks: its eighth bit is the sign, and there is one zero.
FRACTIONS = np.array(
    [0.0, *(2.0**k for k in range(-6, 1)), 0.0, *(-(2.0**k) for k in range(-6, 1))], np.float32
)


def encoded_bytes(name: str, numel: int, block: int) -> int:
    """Return the exact length of a payload. Raises PayloadError for the codec, ConfigError for the block."""
    if name == "float32":
        return 4 * numel
    if name == "bf16":
        return 2 * numel
    if name not in SCALED:
        raise PayloadError(f"unknown codec {name!r}: use float32, bf16, int8, int4 or e3m0")
    if block < 2 or block % 2:
        raise ConfigError(
            f"sync.codec_block={block} must be even and at least 2 (codes go in pairs); use 128"
        )
    return 4 * -(-numel // block) + (numel if name == "int8" else -(-numel // 2))


def encode(
    name: str, values: Floats, block: int, out: Bytes | None = None, *, compiled: bool | None = None
) -> Bytes:
    """Return the payload of values (numel,), in `out` if given (of exactly `encoded_bytes`).

    compiled: numba (True), numpy (False), or numba where it is installed (None). The bytes are the same.
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

    residual (numel,): error feedback. It is added to the difference and then overwritten with what the codec
    lost, for the next push of the same fragment. A loss that is not finite is kept as 0, so that one bad step
    cannot stay.
    """
    assert base.shape == local.shape, (base.shape, local.shape)
    assert residual is None or residual.shape == base.shape
    payload = _room(name, base, block, out)
    if name == "float32" and residual is None:
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(base, local, out=payload.view("<f4"))
        return payload
    difference, decoded = np.empty(_span(block), np.float32), np.empty(_span(block), np.float32)
    for start, stop in _chunks(base.size, block):
        place, delta = (start, base.size, block), difference[: stop - start]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(base[start:stop], local[start:stop], out=delta)
            if residual is not None:
                delta += residual[start:stop]
        _encode_chunk(name, delta, place, payload, compiled)
        if residual is not None:
            sent, lost = decoded[: stop - start], residual[start:stop]
            _decode_chunk(name, payload, place, sent, compiled)
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(delta, sent, out=lost)
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

    Raises PayloadError, with `out` untouched, for a wrong length, an unknown codec or a peak that is no
    finite magnitude. Values of float32 and bf16 payloads may be NaN or Inf: ask `finite`.
    """
    data = np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
    expected = encoded_bytes(name, numel, block)
    if data.size != expected:
        raise PayloadError(
            f"a {name} payload of {numel} values takes {expected} bytes, got {data.size}: "
            "the sender's model, fragments or codec differ from ours"
        )
    if name in SCALED:
        _check_peaks(name, data[: 4 * -(-numel // block)].view("<f4"))
    values = np.empty(numel, np.float32) if out is None else out
    assert values.shape == (numel,) and values.dtype == np.float32 and values.flags.c_contiguous
    for start, stop in _chunks(numel, block):
        _decode_chunk(name, data, (start, numel, block), values[start:stop], compiled)
    return values


def warm(*names: str, block: int) -> None:
    """Have the kernels of these codecs compiled or loaded now: the first use may otherwise take seconds."""
    base, local = np.ones(2 * block, np.float32), np.zeros(2 * block, np.float32)
    for name in names:
        decode(name, encode_difference(name, base, local, block), base.size, block)


def finite(values: Floats) -> bool:
    """Return whether no value is NaN or infinite, without a temporary."""
    return values.size == 0 or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def round_to_bf16(values: Floats, out: Floats | None = None) -> Floats:
    """Return float32 values as a bf16 model holds them: to nearest, ties to even, as torch casts.

    values: contiguous, any shape; `out` may be `values`. This is the base of a bf16 learner's outer gradient:
    measured from the float32 weights, the rounding of the learner's copy would count as training and pull the
    syncer back onto the bf16 grid at every push. Unlike the codec it gives Inf beyond the largest bf16 value,
    as the learner's copy does.
    """
    result = np.empty_like(values) if out is None else out
    assert values.dtype == result.dtype == np.float32 and values.shape == result.shape
    assert values.flags.c_contiguous and result.flags.c_contiguous
    source, target = values.reshape(-1), result.reshape(-1).view(np.uint32)
    for start, stop in _chunks(source.size, 2):
        codes = np.empty(stop - start, np.uint16)
        _kernel("round_bf16", None)(source[start:stop].view(np.int32), codes, False)
        np.left_shift(codes, 16, out=target[start:stop], dtype=np.uint32)
    return result


@functools.cache
def numba_present() -> bool:
    """Return whether compiled kernels are used where nothing else is asked for."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def _room(name: str, values: Floats, block: int, out: Bytes | None) -> Bytes:
    assert values.ndim == 1 and values.dtype == np.float32 and values.flags.c_contiguous, values.dtype
    size = encoded_bytes(name, values.size, block)
    if out is None:
        return np.empty(size, np.uint8)
    assert out.shape == (size,) and out.dtype == np.uint8 and out.flags.c_contiguous, (out.shape, size)
    return out


def _span(block: int) -> int:
    return max(CHUNK // max(block, 1), 1) * max(block, 1)


def _chunks(numel: int, block: int) -> Iterator[tuple[int, int]]:
    span = _span(block)
    return ((start, min(start + span, numel)) for start in range(0, numel, span))


def _check_peaks(name: str, peaks: Floats) -> None:
    if peaks.size and not (peaks.min() >= 0.0 and peaks.max() < np.inf):  # NaN fails both
        raise PayloadError(f"a {name} payload has a peak that is not a finite magnitude: its sender diverged")


def _parts(name: str, payload: Bytes, place: Place, count: int) -> tuple[Bytes, Bytes]:
    """Return the bytes of the peaks and of the codes of a chunk of `count` elements."""
    start, numel, block = place
    per_byte = 1 if name == "int8" else 2
    codes = 4 * -(-numel // block) + start // per_byte
    peaks = 4 * (start // block)
    return payload[peaks : peaks + 4 * -(-count // block)], payload[codes : codes + -(-count // per_byte)]


def _encode_chunk(name: str, values: Floats, place: Place, payload: Bytes, compiled: bool | None) -> None:
    start, _, block = place
    if name == "float32":
        payload[4 * start : 4 * (start + values.size)] = values.astype("<f4", copy=False).view(np.uint8)
    elif name == "bf16":
        halves = np.empty(values.size, np.uint16)
        _kernel("round_bf16", compiled)(values.view(np.int32), halves, True)
        payload[2 * start : 2 * (start + values.size)] = halves.astype("<u2", copy=False).view(np.uint8)
    else:
        peak_bytes, codes = _parts(name, payload, place, values.size)
        peaks = np.empty(peak_bytes.size // 4, np.float32)
        _kernel("peaks", compiled)(values.view(np.int32), block, peaks.view(np.int32))
        _kernel("encode_" + name, compiled)(values, block, peaks, codes)
        peak_bytes[:] = peaks.astype("<f4", copy=False).view(np.uint8)


def _decode_chunk(name: str, payload: Bytes, place: Place, out: Floats, compiled: bool | None) -> None:
    start, _, block = place
    if name == "float32":
        out[:] = payload[4 * start : 4 * (start + out.size)].view("<f4")
    elif name == "bf16":
        halves = payload[2 * start : 2 * (start + out.size)].view("<u2")
        np.left_shift(halves, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        peak_bytes, codes = _parts(name, payload, place, out.size)
        peaks = peak_bytes.view("<f4").astype(np.float32)  # a copy: the payload may lie at any address
        _kernel("decode_" + name, compiled)(codes, block, peaks, out)


# The kernels, one pair a row of the table at the top. All arrays are flat and begin at a block's first
# element.


def _peaks_numba(bits: Any, block: int, peaks: Any) -> None:
    # Integers: LLVM vectorises their maximum, not that of floats, which has to mind NaN.
    for b in range(peaks.size):
        row = bits[b * block : (b + 1) * block]
        top = np.int32(0)
        for i in range(row.size):
            top = np.int32(max(top, np.int32(row[i] & MAGNITUDE)))
        peaks[b] = top if top < INFINITE else NAN


def _peaks_numpy(bits: npt.NDArray[np.int32], block: int, peaks: npt.NDArray[np.int32]) -> None:
    for first, rows in _grids(bits, block):
        top = (rows & MAGNITUDE).max(axis=1)
        peaks[first : first + len(rows)] = np.where(top < INFINITE, top, NAN)


def _encode_int8_numba(values: Any, block: int, peaks: Any, codes: Any) -> None:
    for b in range(peaks.size):
        row, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        peak = peaks[b]
        if not peak > 0:
            code[:] = 0
            continue
        for i in range(row.size):
            code[i] = np.uint8(np.int32(np.rint(row[i] / peak * LEVELS_INT8)))


def _encode_int8_numpy(values: Floats, block: int, peaks: Floats, codes: Bytes) -> None:
    for first, rows in _grids(values, block):
        code = np.rint(_parts_of_peak(rows, peaks[first : first + len(rows)]) * LEVELS_INT8).astype(np.int8)
        codes[first * block : first * block + code.size] = code.view(np.uint8).reshape(-1)


def _decode_int8_numba(codes: Any, block: int, peaks: Any, values: Any) -> None:
    for b in range(peaks.size):
        row, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        peak = peaks[b]
        for i in range(row.size):  # -128 is never written; reading it as -127 keeps every payload finite
            level = np.int32(max(np.int32(np.int8(code[i])), np.int32(-127)))
            row[i] = np.float32(level) / LEVELS_INT8 * peak


def _decode_int8_numpy(codes: Bytes, block: int, peaks: Floats, values: Floats) -> None:
    for first, rows in _grids(values, block):
        code = codes[first * block : first * block + rows.size].view(np.int8).reshape(rows.shape)
        level = np.maximum(code, np.int8(-127)).astype(np.float32)
        rows[:] = level / LEVELS_INT8 * peaks[first : first + len(rows), None]


def _encode_int4_numba(values: Any, block: int, peaks: Any, codes: Any) -> None:
    scratch = np.empty(block, np.uint8)
    for b in range(peaks.size):
        row = values[b * block : (b + 1) * block]
        half = (row.size + 1) // 2
        code, high, peak = codes[b * (block // 2) :][:half], scratch[half : row.size], peaks[b]
        if not peak > 0:
            code[:] = 0
            continue
        for i in range(row.size):
            scratch[i] = np.uint8(np.int32(np.rint(row[i] / peak * SEVEN)) & 15)
        code[half - 1] = scratch[half - 1]
        for i in range(high.size):
            code[i] = np.uint8(scratch[i] | (high[i] << 4))


def _encode_int4_numpy(values: Floats, block: int, peaks: Floats, codes: Bytes) -> None:
    for first, rows in _grids(values, block):
        level = np.rint(_parts_of_peak(rows, peaks[first : first + len(rows)]) * SEVEN).astype(np.int8)
        _pack(level.view(np.uint8) & 15, codes[first * (block // 2) :])


def _decode_int4_numba(codes: Any, block: int, peaks: Any, values: Any) -> None:
    for b in range(peaks.size):
        row = values[b * block : (b + 1) * block]
        half = (row.size + 1) // 2
        code, high, peak = codes[b * (block // 2) :][:half], row[half:], peaks[b]
        for i in range(half):  # the shifts to and fro carry the sign of four bits into eight
            level = np.int32(np.int8(code[i] << 4) >> 4)
            row[i] = np.float32(max(level, np.int32(-7))) / SEVEN * peak
        for i in range(high.size):
            level = np.int32(np.int8(code[i]) >> 4)
            high[i] = np.float32(max(level, np.int32(-7))) / SEVEN * peak


def _decode_int4_numpy(codes: Bytes, block: int, peaks: Floats, values: Floats) -> None:
    for first, rows in _grids(values, block):
        nibbles = _unpack(codes[first * (block // 2) :], rows.shape)
        level = np.maximum((nibbles << 4).view(np.int8) >> 4, np.int8(-7)).astype(np.float32)
        rows[:] = level / SEVEN * peaks[first : first + len(rows), None]


def _encode_e3m0_numba(values: Any, block: int, peaks: Any, codes: Any) -> None:
    scratch = np.empty(block, np.uint8)
    for b in range(peaks.size):
        row = values[b * block : (b + 1) * block]
        half = (row.size + 1) // 2
        code, high, peak = codes[b * (block // 2) :][:half], scratch[half : row.size], peaks[b]
        if not peak > 0:
            code[:] = 0
            continue
        for i in range(row.size):
            part = row[i] / peak
            size = abs(part)  # the seven comparisons are written out because only then they are vectorised
            low = np.int32(size > EDGES[0]) + np.int32(size > EDGES[1]) + np.int32(size > EDGES[2])
            top = np.int32(size > EDGES[3]) + np.int32(size > EDGES[4]) + np.int32(size > EDGES[5])
            level = low + top + np.int32(size > EDGES[6])
            scratch[i] = np.uint8(level | (np.int32(part < -EDGES[0]) << 3))
        code[half - 1] = scratch[half - 1]
        for i in range(high.size):
            code[i] = np.uint8(scratch[i] | (high[i] << 4))


def _encode_e3m0_numpy(values: Floats, block: int, peaks: Floats, codes: Bytes) -> None:
    for first, rows in _grids(values, block):
        part = _parts_of_peak(rows, peaks[first : first + len(rows)])
        size, nibbles = np.abs(part), (part < -EDGES[0]).astype(np.uint8) << 3
        for edge in EDGES:
            nibbles += size > edge
        _pack(nibbles, codes[first * (block // 2) :])


def _decode_e3m0_numba(codes: Any, block: int, peaks: Any, values: Any) -> None:
    for b in range(peaks.size):
        row = values[b * block : (b + 1) * block]
        half = (row.size + 1) // 2
        code, high, peak = codes[b * (block // 2) :][:half], row[half:], peaks[b]
        for i in range(half):
            row[i] = FRACTIONS[code[i] & 15] * peak
        for i in range(high.size):
            high[i] = FRACTIONS[code[i] >> 4] * peak


def _decode_e3m0_numpy(codes: Bytes, block: int, peaks: Floats, values: Floats) -> None:
    for first, rows in _grids(values, block):
        nibbles = _unpack(codes[first * (block // 2) :], rows.shape)
        rows[:] = FRACTIONS[nibbles] * peaks[first : first + len(rows), None]


def _round_bf16_numba(bits: Any, codes: Any, saturate: bool) -> None:
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        rounded = np.int32(np.int32(magnitude + HALF_BF16 + ((magnitude >> 16) & 1)) >> 16)
        if magnitude > INFINITE:
            rounded = np.int32(NAN >> 16)
        elif saturate and rounded == INFINITE >> 16 and magnitude < INFINITE:
            rounded -= np.int32(1)
        codes[i] = np.uint16(rounded | (np.int32(bits[i] < 0) << 15))


def _round_bf16_numpy(bits: npt.NDArray[np.int32], codes: npt.NDArray[np.uint16], saturate: bool) -> None:
    magnitude = bits & MAGNITUDE
    unsigned = magnitude.view(np.uint32)
    rounded = (unsigned + np.uint32(HALF_BF16) + ((unsigned >> 16) & 1)) >> 16
    if saturate:  # a finite value beyond the largest bf16 becomes the largest
        rounded -= (rounded == INFINITE >> 16) & (magnitude < INFINITE)
    rounded[magnitude > INFINITE] = NAN >> 16
    codes[:] = rounded | ((bits < 0).astype(np.uint32) << 15)


def _grids(flat: Any, block: int) -> Iterator[tuple[int, Any]]:
    """Yield (index of the first block, view with a block a row): whole blocks, then the shorter last one."""
    whole = flat.size // block
    if whole:
        yield 0, flat[: whole * block].reshape(whole, block)
    if flat.size % block:
        yield whole, flat[whole * block :].reshape(1, -1)


def _parts_of_peak(rows: Floats, peaks: Floats) -> Floats:
    """Return values over their block's peak, −1 … 1, and 0 where the peak is 0 or NaN."""
    usable = (peaks > 0)[:, None]
    divisors = np.where(usable, peaks[:, None], np.float32(1))
    return np.divide(np.where(usable, rows, np.float32(0)), divisors, dtype=np.float32)


def _pack(nibbles: Bytes, codes: Bytes) -> None:
    half = (nibbles.shape[1] + 1) // 2
    packed = nibbles[:, :half].copy()
    packed[:, : nibbles.shape[1] - half] |= nibbles[:, half:] << 4
    codes[: packed.size] = packed.reshape(-1)


def _unpack(codes: Bytes, shape: tuple[int, int]) -> Bytes:
    half = (shape[1] + 1) // 2
    packed = codes[: shape[0] * half].reshape(shape[0], half)
    nibbles = np.empty(shape, np.uint8)
    nibbles[:, :half] = packed & 15
    nibbles[:, half:] = packed[:, : shape[1] - half] >> 4
    return nibbles


KERNELS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "peaks": (_peaks_numpy, _peaks_numba),
    "encode_int8": (_encode_int8_numpy, _encode_int8_numba),
    "decode_int8": (_decode_int8_numpy, _decode_int8_numba),
    "encode_int4": (_encode_int4_numpy, _encode_int4_numba),
    "decode_int4": (_decode_int4_numpy, _decode_int4_numba),
    "encode_e3m0": (_encode_e3m0_numpy, _encode_e3m0_numba),
    "decode_e3m0": (_decode_e3m0_numpy, _decode_e3m0_numba),
    "round_bf16": (_round_bf16_numpy, _round_bf16_numba),
}


def _kernel(name: str, compiled: bool | None) -> Callable[..., None]:
    if compiled is None:
        compiled = numba_present()
    return _compile(name) if compiled else KERNELS[name][0]


@functools.cache
def _compile(name: str) -> Callable[..., None]:
    """Compile a kernel, or load it from numba's cache on disk. It runs without the interpreter's lock."""
    from numba import boolean, float32, int32, int64, njit, types, uint8, uint16, void

    def read(kind: Any) -> Any:  # also takes writable arrays; received payloads are read-only
        return types.Array(kind, 1, "C", readonly=True)

    if name == "peaks":
        signature = void(read(int32), int64, int32[::1])
    elif name == "round_bf16":
        signature = void(read(int32), uint16[::1], boolean)
    elif name.startswith("encode"):
        signature = void(read(float32), int64, read(float32), uint8[::1])
    else:
        signature = void(read(uint8), int64, read(float32), float32[::1])
    try:
        kernel = njit(signature, nogil=True, cache=True)(KERNELS[name][1])
    except RuntimeError:  # no folder that a cache could be written to
        kernel = njit(signature, nogil=True)(KERNELS[name][1])
    compiled: Callable[..., None] = kernel
    return compiled
