"""Codecs are exact where they promise it, finite everywhere, and the same bits from numpy and numba."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from archipel.errors import ConfigError, PayloadError
from archipel.numerics import codec

torch.set_num_threads(1)
NAMES = ("float32", "bf16", "int8", "int4", "e3m0")
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
DEGENERATE = {
    "empty": [],
    "one": [0.3],
    "zero": [0.0] * 300,
    "minus_zero": [-0.0] * 7,
    "constant": [-0.123] * 257,
    "denormal": [SMALLEST * k for k in range(-70, 70)],
    "edge_of_normal": [1.1754944e-38, -1.1754944e-38, SMALLEST, 0.0],
    "largest": [LARGEST, -LARGEST, 1.0, 0.0, LARGEST / 2],
    "one_large": [1e38] + [1e-38] * 200,
    "tail_of_one": [1.0, -2.0] * 8 + [5.0],
}
needs_numba = pytest.mark.skipif(not codec.numba_present(), reason="numba is not installed")
finite_values = npst.arrays(
    np.float32, st.integers(0, 70), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def floats(values) -> np.ndarray:
    return np.array(values, np.float32)


def normal(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def round_trip(name: str, values: np.ndarray, block: int = 16, *, compiled: bool | None = None) -> np.ndarray:
    payload = codec.encode(name, values, block, compiled=compiled)
    assert payload.size == codec.encoded_bytes(name, values.size, block)
    return codec.decode(name, payload.tobytes(), values.size, block, compiled=compiled)


def peaks(values: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of the block around each value."""
    found = [np.abs(values[at : at + block]).max() for at in range(0, values.size, block)]
    return np.repeat(floats(found), block)[: values.size]


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_values_stay_finite_and_zero_stays_zero(name, compiled, case):
    values = floats(DEGENERATE[case])
    decoded = round_trip(name, values, compiled=compiled)
    assert np.isfinite(decoded).all()
    assert (decoded[values == 0] == 0).all()


@pytest.mark.parametrize("name", ["float32", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("case", ["empty", "one", "zero", "constant"])
def test_zero_constant_one_element_and_empty_are_exact(name, case):
    values = floats(DEGENERATE[case])
    assert np.array_equal(round_trip(name, values), values)


@pytest.mark.parametrize(("name", "steps"), [("int8", 127), ("int4", 7)])
@settings(max_examples=150, deadline=None)
@given(values=finite_values, block=st.sampled_from([2, 6, 16, 128]))
def test_integer_codes_are_off_by_half_a_step_at_most(name, steps, values, block):
    error = np.abs(round_trip(name, values, block).astype(np.float64) - values)
    assert (error <= peaks(values, block) / steps * 0.5 * (1 + 1e-5) + 2 * SMALLEST).all()


@settings(max_examples=100, deadline=None)
@given(finite_values, st.sampled_from([2, 6, 128]))
def test_e3m0_takes_the_nearest_of_its_values(values, block):
    peak = peaks(values, block).astype(np.float64)
    ladder = np.array([0.0, *2.0 ** np.arange(-6, 1)])
    nearest = np.abs(np.abs(values.astype(np.float64))[:, None] - ladder * peak[:, None]).min(
        axis=1, initial=np.inf
    )
    decoded = round_trip("e3m0", values, block).astype(np.float64)
    assert (np.abs(decoded - values) <= nearest + peak * 1e-6 + 2 * SMALLEST).all()
    assert (decoded * values >= 0).all()


def test_e3m0_values_by_hand():
    values = floats([64, -32, 16, 8, 4, 2, 1, 0.4, 0.6, -47, 49, 0])
    assert round_trip("e3m0", values, 12).tolist() == [64, -32, 16, 8, 4, 2, 1, 0, 1, -32, 64, 0]


def test_int4_values_by_hand():
    values = floats([7, -7, 0, 3.4, -3.6, 0.5, 1.5])
    assert round_trip("int4", values, 8).tolist() == [7, -7, 0, 3, -4, 0, 2]


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_a_large_block_leaves_its_neighbour_alone(name):
    values = floats([1e30] * 8 + [1e-30] * 8)
    assert np.array_equal(round_trip(name, values, 8), values)


@needs_numba
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(
    values=npst.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32)),
    block=st.sampled_from([2, 6, 64]),
)
def test_numba_and_numpy_write_the_same_bits_for_any_values(name, values, block):
    plain = codec.encode(name, values, block, compiled=False)
    assert same_bits(plain, codec.encode(name, values, block, compiled=True))


@needs_numba
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", DEGENERATE)
def test_numba_and_numpy_agree_on_degenerate_values(name, case):
    values = floats(DEGENERATE[case])
    assert same_bits(
        codec.encode(name, values, 16, compiled=False), codec.encode(name, values, 16, compiled=True)
    )


@needs_numba
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), numel=st.integers(0, 70), block=st.sampled_from([2, 6, 64]))
def test_numba_and_numpy_read_the_same_values_from_any_bytes(name, data, numel, block):
    size = codec.encoded_bytes(name, numel, block)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    outcomes = []
    for compiled in (False, True):
        try:
            outcomes.append(codec.decode(name, payload, numel, block, compiled=compiled).tobytes())
        except PayloadError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


@needs_numba
@pytest.mark.parametrize("name", NAMES)
def test_numba_and_numpy_agree_over_many_chunks_and_a_tail(name):
    values = normal(3 * codec.CHUNK + 129)
    payload = codec.encode(name, values, 96, compiled=False)
    assert same_bits(payload, codec.encode(name, values, 96, compiled=True))
    assert same_bits(
        codec.decode(name, payload, values.size, 96, compiled=False),
        codec.decode(name, payload, values.size, 96, compiled=True),
    )


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), numel=st.integers(1, 40))
def test_whatever_decodes_is_finite(name, data, numel):
    size = codec.encoded_bytes(name, numel, 8)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        decoded = codec.decode(name, payload, numel, 8)
    except PayloadError:
        return
    assert np.isfinite(decoded).all()


@settings(max_examples=200, deadline=None)
@given(npst.arrays(np.float32, 40, elements=st.floats(width=32)))
def test_rounding_to_bf16_is_torchs(values):
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(codec.round_to_bf16(values), expected, equal_nan=True)
    payload = codec.encode("bf16", values, 2)
    within = np.isfinite(expected) | ~np.isfinite(values)
    assert np.array_equal(codec.decode("bf16", payload, 40, 2)[within], expected[within], equal_nan=True)


def test_bf16_ties_go_to_even():
    step = 2.0**-7
    assert codec.round_to_bf16(floats([1 + step / 2, 1 + 3 * step / 2])).tolist() == [1.0, 1 + 2 * step]


def test_bf16_rounding_keeps_shape_and_works_in_place():
    values = normal(6).reshape(2, 3)
    rounded = codec.round_to_bf16(values)
    assert rounded.shape == (2, 3)
    assert codec.round_to_bf16(values, out=values) is values
    assert np.array_equal(values, rounded) and np.array_equal(codec.round_to_bf16(rounded), rounded)


@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_unscaled_codecs_carry_non_finite_values_to_whoever_refuses_them(name):
    values = floats([1.0, np.nan, np.inf, -np.inf])
    decoded = round_trip(name, values)
    assert np.array_equal(decoded, values, equal_nan=True)
    assert not codec.finite(decoded)


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_numba)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scaled_codecs_let_the_receiver_refuse_non_finite_values(name, compiled, bad):
    values = normal(100)
    values[57] = bad
    out = np.full(100, 9, np.float32)
    payload = codec.encode(name, values, 16, compiled=compiled)
    with pytest.raises(PayloadError, match="peak"):
        codec.decode(name, payload, 100, 16, out, compiled=compiled)
    assert (out == 9).all()


@pytest.mark.parametrize("peak", [np.nan, np.inf, -np.inf, -1.0])
def test_a_forged_peak_is_refused(peak):
    payload = codec.encode("int8", normal(16), 16)
    payload[:4] = floats([peak]).view(np.uint8)
    with pytest.raises(PayloadError, match="peak"):
        codec.decode("int8", payload, 16, 16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_the_wrong_length_is_refused(name, change):
    size = codec.encoded_bytes(name, 33, 16)
    with pytest.raises(PayloadError, match=f"takes {size} bytes, got {size + change}"):
        codec.decode(name, bytes(size + change), 33, 16)


def test_unknown_codecs_and_odd_blocks_are_refused():
    for attempt in (
        lambda: codec.encoded_bytes("int3", 1, 16),
        lambda: codec.encode("int3", normal(1), 16),
        lambda: codec.decode("int3", b"", 0, 16),
    ):
        with pytest.raises(PayloadError, match="int3"):
            attempt()
    for block in (0, -2, 1, 129):
        with pytest.raises(ConfigError, match=r"sync\.codec_block"):
            codec.encoded_bytes("int4", 10, block)


@pytest.mark.parametrize(
    ("name", "size"), [("float32", 1032), ("bf16", 516), ("int8", 270), ("int4", 141), ("e3m0", 141)]
)
def test_sizes_by_hand(name, size):
    assert codec.encoded_bytes(name, 258, 128) == size
    assert codec.encoded_bytes(name, 0, 128) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_decodes_at_any_address(name, wrap):
    values = normal(77)
    payload = codec.encode(name, values, 16).tobytes()
    shifted = memoryview(b"x" + payload)[1:]
    expected = codec.decode(name, payload, 77, 16)
    assert np.array_equal(codec.decode(name, wrap(payload), 77, 16), expected)
    assert np.array_equal(codec.decode(name, shifted, 77, 16), expected)


@pytest.mark.parametrize("name", NAMES)
def test_given_buffers_are_used_at_any_address(name):
    values = normal(77)
    room = np.empty(codec.encoded_bytes(name, 77, 16) + 1, np.uint8)[1:]
    assert codec.encode(name, values, 16, room) is room
    assert same_bits(room.copy(), codec.encode(name, values, 16))
    out = np.empty(77, np.float32)
    assert codec.decode(name, room, 77, 16, out) is out


@pytest.mark.parametrize("name", NAMES)
def test_a_difference_is_coded_as_its_values_would_be(name):
    base, local = normal(codec.CHUNK + 77, 1), normal(codec.CHUNK + 77, 2)
    expected = codec.encode(name, base - local, 96)
    out = np.empty_like(expected)
    assert codec.encode_difference(name, base, local, 96, out) is out
    assert same_bits(out, expected)


def test_values_and_bases_are_left_as_they_were():
    base, local = normal(50, 1), normal(50, 2)
    codec.encode_difference("int4", base, local, 16)
    assert np.array_equal(base, normal(50, 1)) and np.array_equal(local, normal(50, 2))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "e3m0"])
def test_error_feedback_delivers_in_time_what_one_push_loses(name):
    base, local = normal(1000, 1) * 1e-2, np.zeros(1000, np.float32)
    residual, delivered = np.zeros(1000, np.float32), np.zeros(1000)
    for _ in range(50):
        payload = codec.encode_difference(name, base, local, 128, residual=residual)
        delivered += codec.decode(name, payload, 1000, 128)
    assert np.allclose(delivered + residual, 50.0 * base, rtol=1e-4, atol=1e-6)
    once = codec.decode(name, codec.encode(name, base, 128), 1000, 128)
    assert np.abs(delivered / 50 - base).max() < np.abs(once - base).max() / 5


@pytest.mark.parametrize("name", NAMES)
def test_a_diverged_step_does_not_stay_in_the_residual(name):
    base, local = normal(64), np.zeros(64, np.float32)
    local[3] = np.nan
    residual = np.zeros(64, np.float32)
    codec.encode_difference(name, base, local, 16, residual=residual)
    assert np.isfinite(residual).all()


def test_an_overflowing_difference_is_refused_at_the_receiver():
    payload = codec.encode_difference("int8", floats([LARGEST]), floats([-LARGEST]), 16)
    with pytest.raises(PayloadError):
        codec.decode("int8", payload, 1, 16)


def test_finite_sees_each_kind_of_value():
    assert codec.finite(np.empty(0, np.float32)) and codec.finite(floats([LARGEST, -LARGEST, 0]))
    assert not any(codec.finite(floats([0, bad, 1])) for bad in (np.nan, np.inf, -np.inf))


def test_the_codec_imports_neither_torch_nor_anything_else_of_ours_but_errors():
    tree = ast.parse(Path(codec.__file__).read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert found <= {
        "numpy",
        "numpy.typing",
        "numba",
        "functools",
        "typing",
        "collections.abc",
        "archipel.errors",
    }


def test_without_numba_the_reference_is_used(monkeypatch):
    monkeypatch.setattr(codec, "numba_present", lambda: False)
    assert codec._kernel("peaks", None) is codec.KERNELS["peaks"][0]
