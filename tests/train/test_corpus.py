"""Token files: whole or absent, checked when opened, made from any source the same way."""

import gzip
import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

from archipel.errors import DataError
from archipel.train import corpus

WORDS = ["the sea is calm tonight", "the tide is full", "the moon lies fair upon the straits"]


def tokens_of(path):
    return bytes(corpus.open_tokens(path).tokens)


def joined(texts):
    return b"".join(text.encode() + b"\0" for text in texts)


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "a.txt").write_text(WORDS[0])
    corpus.prepare(tmp_path / "a.txt", tmp_path / "t.bin")
    return tmp_path / "t.bin"


def test_bytes_are_kept_and_each_document_ends_with_zero(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve\0 café".encode())
    header = corpus.prepare(tmp_path / "a.txt", tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == "naïve café\0".encode()
    assert (header.vocabulary, header.documents, header.count, header.dtype) == (256, 1, 13, "uint8")


def test_directories_and_globs_come_sorted_and_empty_files_are_left_out(tmp_path):
    for name, text in [("b/two.txt", WORDS[1]), ("a.txt", WORDS[0]), ("c.md", WORDS[2]), ("empty.txt", "")]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG")
    corpus.prepare(tmp_path / "in", tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS)
    corpus.prepare(str(tmp_path / "in" / "*.txt"), tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS[:1])
    corpus.prepare([str(tmp_path / "in/c.md"), str(tmp_path / "in/a.txt")], tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == joined([WORDS[2], WORDS[0]])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_by_field(tmp_path, name):
    lines = "\n".join(json.dumps({"id": 1, "body": word}) for word in WORDS) + "\n\n"
    (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    corpus.prepare(tmp_path / name, tmp_path / "t.bin", field="body")
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2 is not JSON"),
        ('{"txt": "x"}', r"a.jsonl:2 has no text in 'text'.*\['txt'\]"),
        ("3", "int"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        corpus.prepare(tmp_path / "a.jsonl", tmp_path / "t.bin")


def test_parquet_through_datasets(tmp_path):
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for shard, words in enumerate([WORDS[:2], WORDS[2:]]):
        parquet.write_table(
            arrow.table({"id": ["x"] * len(words), "text": words}), tmp_path / f"{shard}.parquet"
        )
    corpus.prepare(str(tmp_path / "*.parquet"), tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS)
    corpus.prepare(tmp_path, tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS)
    with pytest.raises(DataError, match=r"no text in column 'body'.*\['id', 'text'\]"):
        corpus.prepare(str(tmp_path / "*.parquet"), tmp_path / "t.bin", field="body")
    (tmp_path / "0.parquet").write_bytes(b"not a table")
    with pytest.raises(DataError, match="cannot read"):
        corpus.prepare(str(tmp_path / "*.parquet"), tmp_path / "t.bin")


def test_tokens_max_stops_after_a_whole_document(tmp_path):
    for number, word in enumerate(WORDS):
        (tmp_path / f"{number}.txt").write_text(word)
    header = corpus.prepare(str(tmp_path / "*.txt"), tmp_path / "t.bin", tokens_max=25)
    assert header.documents == 2
    assert tokens_of(tmp_path / "t.bin") == joined(WORDS[:2])


@pytest.mark.parametrize("source", ["./nothing", "/no/where.txt", "a/b/c", "*.nothing", "gone.parquet"])
def test_path_without_text_is_said_and_leaves_nothing(tmp_path, source):
    with pytest.raises(DataError, match="no file, directory or glob"):
        corpus.prepare(source, tmp_path / "t.bin")
    assert not list(tmp_path.iterdir())


def test_source_of_empty_files_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        corpus.prepare(tmp_path / "a.txt", tmp_path / "t.bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_failure_half_way_keeps_the_old_file(prepared):
    def broken():
        yield b"x" * 3_000_000
        raise DataError("the source broke off")

    before = tokens_of(prepared)
    with pytest.raises(DataError, match="broke off"):
        corpus.write_tokens(corpus.load_tokenizer("bytes"), broken(), prepared)
    assert tokens_of(prepared) == before
    assert sorted(path.name for path in prepared.parent.iterdir()) == ["a.txt", "t.bin", "t.bin.json"]


def test_one_flipped_bit_is_noticed(prepared):
    raw = bytearray(prepared.read_bytes())
    raw[5] ^= 1
    prepared.write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        corpus.open_tokens(prepared)
    assert len(corpus.open_tokens(prepared, verify=False).tokens) == len(raw)


def test_file_cut_short_is_noticed_even_unverified(prepared):
    prepared.write_bytes(prepared.read_bytes()[:-1])
    with pytest.raises(DataError, match="23 bytes, its header says 24"):
        corpus.open_tokens(prepared, verify=False)


def test_missing_file_and_missing_header_say_what_to_do(prepared):
    with pytest.raises(DataError, match=r"no token file.*archipel data prepare"):
        corpus.open_tokens(prepared.with_name("other.bin"))
    corpus.header_path(prepared).unlink()
    with pytest.raises(DataError, match=r"t.bin.json is missing"):
        corpus.open_tokens(prepared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"format": 2}, "format 2"), ({"dtype": "object"}, "dtype object"), ({"surprise": 1}, "not the header")],
)
def test_header_of_another_format_is_refused(prepared, changes, message):
    sidecar = corpus.header_path(prepared)
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | changes))
    with pytest.raises(DataError, match=message):
        corpus.open_tokens(prepared)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_element_type_is_the_smallest_that_fits(tmp_path, vocabulary, dtype):
    encoder = corpus.Encoder("n", "n", vocabulary, lambda texts: iter([np.array([0, vocabulary - 1])]))
    assert corpus.write_tokens(encoder, [], tmp_path / "t.bin").dtype == dtype
    assert corpus.open_tokens(tmp_path / "t.bin").tokens.tolist() == [0, vocabulary - 1]


def test_vocabulary_beyond_32_bits_is_refused():
    with pytest.raises(DataError, match="32 bits"):
        corpus.dtype_for(2**32 + 1)


def test_tokens_are_read_only(prepared):
    with pytest.raises(ValueError, match="read-only"):
        corpus.open_tokens(prepared).tokens[0] = 1


def test_bpe_is_learned_saved_and_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(" ".join(WORDS) * 20)
    (tmp_path / "b.txt").write_text("unseen: ☃")
    digest = corpus.train_bpe(tmp_path / "a.txt", tmp_path / "bpe.json", vocabulary=300)
    assert corpus.train_bpe(tmp_path / "a.txt", tmp_path / "again.json", vocabulary=300) == digest
    header = corpus.prepare(str(tmp_path / "*.txt"), tmp_path / "t.bin", tokenizer=str(tmp_path / "bpe.json"))
    assert (header.dtype, header.vocabulary, header.tokenizer_digest) == ("uint16", 300, digest)
    tokens = corpus.open_tokens(tmp_path / "t.bin").tokens.tolist()
    assert len(tokens) < 20 * len(" ".join(WORDS)) / 2
    border = tokens.index(0)
    held = tokenizers.Tokenizer.from_file(str(tmp_path / "bpe.json"))
    assert held.decode(tokens[:border]) == " ".join(WORDS) * 20
    assert held.decode(tokens[border + 1 : -1]) == "unseen: ☃"
    assert tokens[-1] == 0


def test_tokenizer_that_cannot_separate_documents_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match="no token to separate documents"):
        corpus.load_tokenizer(str(tmp_path / "bare.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizers JSON"):
        corpus.load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(DataError, match="no tokenizer at"):
        corpus.load_tokenizer(str(tmp_path / "absent.json"))


def test_python_library_is_real_text_in_a_fixed_order():
    texts = corpus.python_library()
    assert 2_000_000 < sum(map(len, texts)) < 40_000_000
    assert any(b"class TemporaryDirectory" in text for text in texts)
    assert texts == corpus.python_library()


def test_python_library_leaves_out_what_differs_between_installations(tmp_path):
    for name in [
        "os.py",
        "json/tool.py",
        "test/x.py",
        "_sysconfigdata__linux.py",
        "site-packages/p.py",
        "a.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sorted(corpus.python_library(tmp_path)) == [b"json/tool.py", b"os.py"]


def _make_default(cache, answers):
    answers.put(corpus.open_tokens(corpus.default_corpus(cache)).header.digest)


def test_several_processes_make_the_default_corpus_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=_make_default, args=(tmp_path, answers)) for _ in range(3)]
    for worker in workers:
        worker.start()
    digests = {answers.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(digests) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_default_corpus_is_made_once_and_again_for_other_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "python_library", lambda: [b"import this"])
    path = corpus.default_corpus(tmp_path)
    made = path.stat().st_mtime_ns, path.stat().st_ino
    assert corpus.default_corpus(tmp_path) == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == made
    monkeypatch.setattr(corpus, "python_library", lambda: [b"import that"])
    assert corpus.default_corpus(tmp_path) != path


def test_place_that_cannot_be_written_is_said(prepared):
    with pytest.raises(DataError, match=r"cannot write.*another directory"):
        corpus.prepare(prepared.parent / "a.txt", prepared / "below" / "t.bin")


def test_missing_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['tokenizers'] = None; sys.modules['datasets'] = None\n"
        "from archipel.train import corpus\n"
        f"for call in (lambda: corpus.train_bpe('python', {str(tmp_path / 'x')!r}),"
        f" lambda: corpus.prepare('owner/name', {str(tmp_path / 'y')!r})):\n"
        "    try: call()\n"
        "    except corpus.DataError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.count("pip install -e '.[data]'") == 2
