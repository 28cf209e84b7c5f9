"""The order of the data: disjoint shards, exact resumption, journals that outlive their process."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from archipel.errors import ConfigError, DataError
from archipel.train import corpus, data
from archipel.train.options import DataOptions, ModelOptions, fit

torch.set_num_threads(1)

PERMUTATION_OF_TEN = [5, 9, 6, 0, 4, 3, 1, 7, 2, 8]
PERMUTATION_OF_A_TRILLION = [291428003198, 84095848510]


def stream(tokens, **changes):
    given_options = {"seed": 3, "shard": 0, "shards": 1, "sequence": 4} | changes
    return data.TokenStream(tokens, **given_options)


def first_inputs(stream, windows):
    """The first token of each window names the window when tokens count up."""
    return (stream.next(windows).inputs[:, 0] // stream.sequence).tolist()


@pytest.fixture
def token_file(tmp_path):
    texts = [bytes([65 + n % 26]) * 99 for n in range(40)]  # 4,000 tokens with the separators
    corpus.write_tokens(corpus.load_tokenizer("bytes"), texts, tmp_path / "t.bin")
    return tmp_path / "t.bin"


@given(some.integers(1, 3000), some.integers(0, 2**63), some.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_permutation_hits_every_index_once(count, seed, lap):
    assert np.array_equal(np.sort(data.permuted(np.arange(count), count, (seed, lap))), np.arange(count))


def test_permutation_never_changes():
    """Written down: a tape made with one version must replay with the next."""
    assert data.permuted(np.arange(10), 10, (0, 0)).tolist() == PERMUTATION_OF_TEN
    assert data.permuted(np.array([0, 10**12 - 1]), 10**12, (7, 3)).tolist() == PERMUTATION_OF_A_TRILLION


def test_permutation_does_not_depend_on_what_is_asked_together():
    whole = data.permuted(np.arange(1000), 1000, (5, 0))
    alone = [int(data.permuted(np.array([index]), 1000, (5, 0))[0]) for index in range(0, 1000, 97)]
    assert alone == whole[::97].tolist()


def test_permutation_of_another_seed_or_lap_is_another():
    first, seed, lap = (data.permuted(np.arange(1000), 1000, key) for key in ((5, 0), (6, 0), (5, 1)))
    assert (first == seed).sum() < 20
    assert (first == lap).sum() < 20


@given(some.integers(1, 70), some.integers(0, 300), some.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_shards_together_read_every_window_exactly_once(shards, more, seed):
    windows = shards + more
    starts = sorted(part * windows // shards for part in range(shards))
    lengths = dict(zip(starts, np.diff([*starts, windows]).tolist(), strict=True))
    read = []
    for shard in range(shards):
        walk = data.Walk(windows, seed=seed, shard=shard, shards=shards)
        start = data.starting_order(shards)[shard] * windows // shards
        read.extend(walk.windows(0, lengths[start]).tolist())
    assert sorted(read) == list(range(windows))


@given(some.integers(1, 40), some.integers(0, 200), some.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_shards_that_drew_equally_much_share_no_window(shards, more, drawn):
    windows = shards + more
    walks = [data.Walk(windows, seed=1, shard=shard, shards=shards) for shard in range(shards)]
    assert len({int(walk.windows(drawn, 1)[0]) for walk in walks}) == shards


def test_one_shard_alone_reads_everything_before_it_repeats():
    walk = data.Walk(101, seed=0, shard=2, shards=5)
    first, second = walk.windows(0, 101), walk.windows(101, 101)
    assert sorted(first) == sorted(second) == list(range(101))
    assert not np.array_equal(first, second)


def test_few_shards_of_many_start_far_apart():
    assert data.starting_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(data.starting_order(6)) == list(range(6))
    assert data.starting_order(1) == [0]


def test_batch_holds_windows_and_the_tokens_that_follow():
    batch = stream(np.arange(41, dtype=np.uint16)).next(3)
    assert batch.inputs.shape == batch.targets.shape == (3, 4)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert (batch.inputs[:, 0] % 4 == 0).all()


@given(some.integers(0, 60), some.lists(some.integers(1, 9), max_size=6))
@settings(max_examples=40, deadline=None)
def test_stream_resumed_at_a_position_goes_on_as_if_never_stopped(before, sizes):
    tokens = np.arange(201, dtype=np.uint16)
    straight = stream(tokens, shards=4, shard=1)
    wanted = first_inputs(straight, before + sum(sizes) + 1)[before:]
    resumed = stream(tokens, shards=4, shard=1, position=before * 4)
    got = [window for size in [*sizes, 1] for window in first_inputs(resumed, size)]
    assert got == wanted


def test_position_counts_the_shard_and_consumed_this_object():
    resumed = stream(np.arange(400), position=40)
    resumed.next(3)
    resumed.next(2)
    assert (resumed.position, resumed.consumed) == (60, 20)


def test_position_inside_a_window_skips_its_rest():
    """The sequence length was another before: 6 tokens were drawn, the next whole window starts at 8."""
    tokens = np.arange(400)
    assert first_inputs(stream(tokens, position=6), 2) == first_inputs(stream(tokens, position=8), 2)


def test_batches_go_over_the_end_of_a_lap():
    tokens = np.arange(41)  # 10 windows
    seen = first_inputs(stream(tokens, position=32), 4)
    assert len(seen) == 4
    assert set(seen[:2]) | set(first_inputs(stream(tokens), 8)) == set(range(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": 4, "shards": 4}, "shard 4 is out of range.*0 to 3"),
        ({"shard": -1}, "out of range"),
        ({"shards": 26}, "25 windows, fewer than data.shards=26"),
        ({"sequence": 101}, "101 tokens are fewer than one window"),
        ({"position": -4}, "position -4 is negative"),
    ],
)
def test_impossible_streams_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        stream(np.arange(101), **changes)


def test_empty_batch_is_refused():
    with pytest.raises(DataError, match="empty"):
        stream(np.arange(101)).next(0)


def test_journal_says_what_was_drawn_before_it_is_used(tmp_path):
    drawn = stream(np.arange(401), shards=3, shard=2, position=8, journal=tmp_path / "j")
    assert data.read_journal(tmp_path / "j") == (2, 8, 0)
    drawn.next(5)
    assert data.read_journal(tmp_path / "j") == (2, 28, 20)


def test_new_incarnation_starts_its_own_count(tmp_path):
    stream(np.arange(401), journal=tmp_path / "j").next(5)
    entry = data.read_journal(tmp_path / "j")
    stream(np.arange(401), position=entry.position, journal=tmp_path / "j").next(1)
    assert data.read_journal(tmp_path / "j") == (0, 24, 4)


def _draw_and_die(path):
    drawn = data.TokenStream(np.arange(4001), seed=0, shard=1, shards=2, sequence=4, journal=path)
    for _ in range(7):
        drawn.next(3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_journal_outlives_a_killed_process(tmp_path):
    victim = multiprocessing.get_context("spawn").Process(target=_draw_and_die, args=(tmp_path / "j",))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert data.read_journal(tmp_path / "j") == (1, 84, 84)


def test_something_else_is_no_journal(tmp_path):
    (tmp_path / "j").write_bytes(b"short")
    with pytest.raises(DataError, match="5 bytes"):
        data.read_journal(tmp_path / "j")
    with pytest.raises(DataError, match="cannot read"):
        data.read_journal(tmp_path / "absent")


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, -5, 0), (0, 4, 8), (0, 2**53, 0)])
def test_numbers_that_no_stream_notes_are_no_journal(tmp_path, numbers):
    (tmp_path / "j").write_bytes(data.JOURNAL.pack(*numbers))
    with pytest.raises(DataError, match="damaged; remove it"):
        data.read_journal(tmp_path / "j")


def test_a_journal_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    on_disk = []
    sync = os.fsync

    def watched(descriptor):
        sync(descriptor)
        on_disk.append((os.fstat(descriptor).st_size, (tmp_path / "j").exists()))

    monkeypatch.setattr(os, "fsync", watched)
    data.Journal(tmp_path / "j", 0, 8)
    assert on_disk == [(data.JOURNAL.size, False)]


def test_validation_text_is_never_trained_on(tmp_path):
    numbers = np.arange(1000, dtype=np.uint16)
    encoder = corpus.Encoder("n", "n", 1000, lambda texts: iter([numbers]))
    corpus.write_tokens(encoder, [], tmp_path / "n.bin")
    options = DataOptions(path=str(tmp_path / "n.bin"), sequence=7, shards=1, valid_fraction=0.1)
    loaded = data.load(options)
    trained = torch.cat(loaded.stream(0).next(899 // 7))
    validated = torch.cat([torch.cat(batch) for batch in loaded.validation(100, 100)])
    assert trained.max() < 900 <= validated.min()


def test_validation_is_the_same_every_time_and_spread_over_its_text(token_file):
    options = DataOptions(path=str(token_file), sequence=16, shards=2, valid_fraction=0.5)
    first, again = ([b.inputs for b in data.validation(options, 3, 4)] for _ in range(2))
    assert [len(inputs) for inputs in first] == [4, 4, 4]
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert len({tuple(row) for inputs in first for row in inputs.tolist()}) > 6


def test_validation_of_more_than_there_is_takes_all_once(token_file):
    options = DataOptions(path=str(token_file), sequence=16, shards=2, valid_fraction=0.1)
    assert sum(len(batch.inputs) for batch in data.validation(options, 100, 16)) == 399 // 16


def test_no_validation_data_is_said(token_file):
    options = DataOptions(path=str(token_file), sequence=16, shards=2, valid_fraction=0.0)
    with pytest.raises(DataError, match="fewer than one window"):
        list(data.validation(options, 1, 1))


def test_two_loads_of_one_shard_give_equal_batches(token_file):
    options = DataOptions(path=str(token_file), sequence=16, shards=4)
    one, two = (data.stream(options, 3, position=64).next(5) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)


def test_a_file_made_with_another_tokenizer_is_refused(token_file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(DataError, match="made with the tokenizer bytes"):
        data.load(DataOptions(path=str(token_file), tokenizer=str(other)))
    assert data.load(DataOptions(path=str(token_file), tokenizer="bytes")).vocabulary == 256


def test_model_smaller_than_the_vocabulary_is_refused(token_file):
    options = DataOptions(path=str(token_file))
    with pytest.raises(DataError, match=r"model.vocabulary=100 is smaller than the data's 256"):
        fit(ModelOptions(vocabulary=100), options, data.load(options).vocabulary)
    assert fit(ModelOptions(), options, 256).vocabulary == 256
    assert fit(ModelOptions(vocabulary=300), options, 256).vocabulary == 300


def test_model_with_a_shorter_context_than_the_data_is_refused():
    with pytest.raises(DataError, match=r"data.sequence=128 exceeds model.sequence=64"):
        fit(ModelOptions(sequence=64), DataOptions(), 256)


def test_images_need_a_vision_model_and_text_another():
    with pytest.raises(DataError, match=r"kind=decoder cannot learn from data.source=digits"):
        fit(ModelOptions(), DataOptions(source="digits"), 10)
    with pytest.raises(DataError, match=r"kind=vit cannot learn from data.source=tokens"):
        fit(ModelOptions(kind="vit"), DataOptions(), 256)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"\[data\].*sequence"):
        data.load(DataOptions(sequence=0))


def test_digits_count_images_and_resume():
    pytest.importorskip("sklearn")
    options = DataOptions(source="digits", shards=8)
    loaded = data.load(options)
    straight = loaded.stream(2)
    straight.next(10)
    following, resumed = straight.next(4), loaded.stream(2, position=10).next(4)
    assert following.inputs.shape == (4, 1, 8, 8)
    assert following.inputs.dtype == torch.float32
    assert float(following.inputs.min()) >= 0 and float(following.inputs.max()) <= 1
    assert torch.equal(following.inputs, resumed.inputs)
    assert torch.equal(following.targets, resumed.targets)
    assert (straight.position, straight.consumed) == (14, 14)
    assert sum(len(batch.targets) for batch in loaded.validation(100, 16)) == int(1797 * 0.05)


def test_default_corpus_that_was_damaged_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "python_library", lambda: [b"import this\n" * 20] * 50)
    path = corpus.default_corpus(tmp_path)
    path.write_bytes(b"x" * path.stat().st_size)
    loaded = data.load(DataOptions(cache=str(tmp_path), sequence=16, shards=2))
    assert loaded.digest == corpus.open_tokens(path).header.digest
