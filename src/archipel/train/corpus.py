"""Token files: their format, and their preparation from text, JSONL, Parquet or a Hugging Face data set.

A token file is raw little-endian tokens, `NAME.bin`, of the smallest type its vocabulary fits, and a JSON
sidecar `NAME.bin.json` (`TokenHeader`). It is read through a memory map: a corpus may be larger than memory.

Every document is followed by one separator token. Bytes (vocabulary 256) separate with 0, which text does not
hold; should a document hold one, it is dropped. A tokenizer of the `tokenizers` library separates with the
first entry of `SEPARATORS` it knows.

Invariants: the same source and tokenizer give the same bytes on every machine. Both files are written under a
temporary name and renamed, header last, so that any number of processes may prepare the same file at once and
none ever reads half of one. Nothing here imports torch.
"""

import gzip
import itertools
import mmap
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from archipel.errors import DataError

FORMAT = 1
SEPARATORS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
DOCUMENTS_PER_CALL = 256  # documents a tokenizer is given at once; it spreads them over the cores
BLOCK_BYTES = 1 << 24
SAMPLE_BYTES = 1 << 20  # of a text file, to see whether it is one
FOREIGN_SHARE = 0.1  # a Latin-1 text has less, a picture or an archive about half
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_INSTALL = "pip install -e '.[data]' in a checkout of archipel"


class TokenHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """The sidecar of a token file."""

    format: int
    dtype: str  # "uint8", "uint16" or "uint32", little-endian
    count: int  # tokens in the file
    documents: int
    vocabulary: int  # entries of the tokenizer; every token is below
    tokenizer: str  # "bytes", or the name of the tokenizer's file
    tokenizer_digest: str  # xxh3 of that file; "bytes" for bytes
    digest: str  # xxh3 of the tokens' bytes


class TokenFile(NamedTuple):
    """A token file that was opened: its header, and the tokens as a read-only map of the file."""

    header: TokenHeader
    tokens: np.ndarray


class Encoder(NamedTuple):
    """Documents to arrays of tokens, separator included."""

    name: str
    digest: str
    vocabulary: int
    encode: Callable[[Iterable[bytes]], Iterator[np.ndarray]]


def header_path(path: Path) -> Path:
    """Return where the sidecar of a token file lies."""
    return path.with_name(path.name + ".json")


def dtype_for(vocabulary: int) -> np.dtype:
    """Return the smallest element type that holds every token below `vocabulary`."""
    for name in ("uint8", "uint16", "uint32"):
        if vocabulary - 1 <= np.iinfo(name).max:
            return np.dtype(name).newbyteorder("<")
    raise DataError(f"a vocabulary of {vocabulary} entries exceeds 32 bits: use a smaller tokenizer")


def open_tokens(path: Path | str, *, verify: bool = True) -> TokenFile:
    """Return a token file. verify: read it whole and compare its checksum (about 0.2 s per GB from memory).

    Raises DataError if it is missing, of another format, of the wrong length, or damaged.
    """
    path = Path(path).expanduser()
    header = _read_header(path)
    expected = header.count * np.dtype(header.dtype).itemsize
    actual = path.stat().st_size
    if actual != expected:
        raise DataError(
            f"{path} holds {actual} bytes, its header says {expected}: it was cut short or "
            "replaced; prepare it again"
        )
    if not header.count:
        raise DataError(f"{path} holds no tokens: prepare it from a source with text in it")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if verify and xxhash.xxh3_128_hexdigest(mapped) != header.digest:
        raise DataError(f"{path} is damaged: its checksum differs from its header's; prepare it again")
    return TokenFile(header, np.frombuffer(mapped, dtype=np.dtype(header.dtype).newbyteorder("<")))


def _read_header(path: Path) -> TokenHeader:
    sidecar = header_path(path)
    if not path.is_file() or not sidecar.is_file():
        lacking = sidecar if path.is_file() else path
        raise DataError(
            f"no token file at {path} ({lacking.name} is missing): make one with `archipel data prepare`"
        )
    try:
        header = msgspec.json.decode(sidecar.read_bytes(), type=TokenHeader)
    except msgspec.DecodeError as error:
        raise DataError(f"{sidecar} is not the header of a token file ({error}): prepare it again") from None
    if header.format != FORMAT or header.dtype not in ("uint8", "uint16", "uint32") or header.count < 0:
        raise DataError(
            f"{sidecar}: format {header.format}, dtype {header.dtype}, count {header.count} cannot be read "
            f"by this version (format {FORMAT}): prepare it again"
        )
    return header


def prepare(
    source: str | Path | list[str],
    out: Path | str,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    tokens_max: int = 0,
) -> TokenHeader:
    """Write a token file from a source and return its header.

    source: "python" (text of the standard library); files, directories or globs of text, JSONL or Parquet; or
    the name of a Hugging Face data set (`config` and `split` are its own). A list: one after the other.
    tokenizer: "bytes" or a `tokenizers` JSON. field: the JSONL key or the column that holds the text.
    tokens_max: stop after the document that reaches so many tokens; 0: take all.
    Raises DataError if the source, the tokenizer or the place to write to is unusable, or a source itself.
    """
    out = Path(out).expanduser()
    _refuse_overwriting([*_names(source), tokenizer], out, header_path(out))
    encoder = load_tokenizer(tokenizer)
    texts = documents(source, field=field, config=config, split=split)
    return write_tokens(encoder, texts, out, tokens_max=tokens_max)


def _names(source: str | Path | list[str]) -> list[str]:
    return [str(name) for name in (source if isinstance(source, list) else [source])]


def _refuse_overwriting(names: list[str], *written: Path) -> None:
    """Raise DataError where a file that will be written is one of those that are read."""
    for path in written:
        if path.exists() and any(path.samefile(read) for name in names for read in _files(name)):
            raise DataError(f"{path} would be overwritten, and it is read from: write to another file")


def not_text(source: str | Path | list[str]) -> list[Path]:
    """Return the text files of a source that are mostly something else: more than a tenth of their first
    bytes are no UTF-8, or zero. Of JSONL and Parquet nothing is said."""
    paths = [path for name in _names(source) if name != "python" for path in _files(name)]
    return [
        path for path in paths if not path.name.endswith(JSONL_SUFFIXES + PARQUET_SUFFIXES) and _foreign(path)
    ]


def _foreign(path: Path) -> bool:
    try:
        with _open(path) as file:
            sample = file.read(SAMPLE_BYTES)
    except (OSError, EOFError):
        return False  # whoever reads it whole says what is wrong
    text = sample.decode("utf-8", errors="ignore").replace("\0", "")
    return len(sample) - len(text.encode()) > FOREIGN_SHARE * len(sample)


def write_tokens(encoder: Encoder, texts: Iterable[bytes], out: Path, *, tokens_max: int = 0) -> TokenHeader:
    """Encode documents into a token file. Raises DataError if there is no text, or the disk refuses."""
    dtype = dtype_for(encoder.vocabulary)
    hasher, count, number = xxhash.xxh3_128(), 0, 0
    with _replacing(out) as file:
        for tokens in encoder.encode(texts):
            raw = tokens.astype(dtype, copy=False).tobytes()
            hasher.update(raw)
            file.write(raw)
            count, number = count + tokens.size, number + 1
            if tokens_max and count >= tokens_max:
                break
        if not number:
            raise DataError(f"nothing to write to {out}: the source holds no text")
    header = TokenHeader(
        format=FORMAT,
        dtype=dtype.name,
        count=count,
        documents=number,
        vocabulary=encoder.vocabulary,
        tokenizer=encoder.name,
        tokenizer_digest=encoder.digest,
        digest=hasher.hexdigest(),
    )
    with _replacing(header_path(out)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n")
    return header


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a temporary file that becomes `path` if the block ends well, and vanishes otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}; choose another directory") from error
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def load_tokenizer(tokenizer: str) -> Encoder:
    """Return the encoder of "bytes" or of a `tokenizers` JSON file. Raises DataError if it is none."""
    if tokenizer == "bytes":
        return Encoder("bytes", "bytes", 256, _encode_bytes)
    path = Path(tokenizer).expanduser()
    if not path.is_file():
        raise DataError(f'no tokenizer at {path}: give "bytes" or the path of a tokenizers JSON file')
    library = _tokenizers()
    try:
        held = library.Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is not a tokenizers JSON file: {error}") from error
    separator = next((found for name in SEPARATORS if (found := held.token_to_id(name)) is not None), None)
    if separator is None:
        raise DataError(f"{path} has no token to separate documents: add one of {', '.join(SEPARATORS)}")

    def encode(texts: Iterable[bytes]) -> Iterator[np.ndarray]:
        return _encode_batches(held, separator, texts)

    return Encoder(path.name, tokenizer_digest(str(path)), held.get_vocab_size(), encode)


def tokenizer_digest(tokenizer: str) -> str:
    """Return what `TokenHeader.tokenizer_digest` holds for "bytes" or a tokenizer's file."""
    if tokenizer == "bytes":
        return "bytes"
    return xxhash.xxh3_128_hexdigest(Path(tokenizer).expanduser().read_bytes())


def _encode_bytes(texts: Iterable[bytes]) -> Iterator[np.ndarray]:
    for text in texts:
        yield np.frombuffer(text.replace(b"\0", b"") + b"\0", dtype=np.uint8)


def _encode_batches(held: Any, separator: int, texts: Iterable[bytes]) -> Iterator[np.ndarray]:
    for group in _batched(texts, DOCUMENTS_PER_CALL):
        decoded = [text.decode("utf-8", errors="replace") for text in group]
        for encoding in held.encode_batch(decoded, add_special_tokens=False):
            yield np.array([*encoding.ids, separator], dtype=np.uint32)


def _batched(texts: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    remaining = iter(texts)
    while group := list(itertools.islice(remaining, size)):
        yield group


def train_bpe(
    source: str | Path | list[str], out: Path | str, *, vocabulary: int = 4096, field: str = "text"
) -> str:
    """Learn a byte-level BPE from a source, save it as a `tokenizers` JSON and return its digest.

    It has every byte, so any text can be encoded, and entry 0 separates documents.
    """
    out = Path(out).expanduser()
    _refuse_overwriting(_names(source), out)
    library = _tokenizers()
    held = library.Tokenizer(library.models.BPE())
    held.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATORS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text.decode("utf-8", errors="replace") for text in documents(source, field=field))
    held.train_from_iterator(texts, trainer)
    with _replacing(out) as file:
        file.write(held.to_str(pretty=True).encode())
    return tokenizer_digest(str(out))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"this tokenizer needs the extra `data`: {_INSTALL}") from error
    return tokenizers


def documents(
    source: str | Path | list[str], *, field: str = "text", config: str | None = None, split: str = "train"
) -> Iterator[bytes]:
    """Yield the texts of a source (see `prepare`) in a fixed order, UTF-8; empty ones are left out."""
    for name in _names(source):
        yield from filter(None, _documents_of(name, field, config, split))


def _documents_of(name: str, field: str, config: str | None, split: str) -> Iterator[bytes]:
    if name == "python":
        return iter(python_library())
    paths = _files(name)
    if paths:
        return _documents_in(paths, field)
    if _looks_like_path(name):
        raise DataError(f"no file, directory or glob at {name}, or none with text in it: check the path")
    return _streamed(field, name, path=name, name=config, split=split)


def _looks_like_path(name: str) -> bool:
    """A data set is called NAME or OWNER/NAME; anything else can only have been meant as a path."""
    known = name.endswith(TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES)
    return (
        known or name.startswith((".", "/", "~")) or name.count("/") > 1 or "*" in name or Path(name).exists()
    )


def _files(name: str) -> list[Path]:
    """Return the files of a path, a glob, or a directory (those with a known suffix below it), sorted."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES
        return sorted(found for found in path.rglob("*") if found.name.endswith(suffixes) and found.is_file())
    return [Path(found) for found in sorted(glob(str(path), recursive=True)) if Path(found).is_file()]


def _documents_in(paths: list[Path], field: str) -> Iterator[bytes]:
    """Yield from Parquet files together, and from the others one by one."""
    for parquet, group in itertools.groupby(paths, key=lambda path: path.name.endswith(PARQUET_SUFFIXES)):
        if parquet:
            files = [str(path) for path in group]
            yield from _streamed(field, files[0], path="parquet", data_files=files, split="train")
        else:
            for path in group:
                yield from _jsonl(path, field) if path.name.endswith(JSONL_SUFFIXES) else [_whole(path)]


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _whole(path: Path) -> bytes:
    try:
        with _open(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _jsonl(path: Path, field: str) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_in(line, field, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _text_in(line: bytes, field: str, place: str) -> bytes:
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise DataError(f"{place} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{place} has no text in {field!r}: name the field (it has {keys})")
    return record[field].encode()


def _streamed(field: str, shown: str, **call: Any) -> Iterator[bytes]:
    """Yield a column through `datasets.load_dataset(**call, streaming=True)`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{shown} needs the extra `data`: {_INSTALL}") from error
    try:
        for row in datasets.load_dataset(**call, streaming=True):
            yield _text_of(row, field, shown)
    except DataError:
        raise
    except Exception as error:  # whatever datasets, pyarrow or the network may raise
        raise DataError(f"cannot read {shown} as files or as a Hugging Face data set: {error}") from error


def _text_of(row: dict[str, Any], field: str, shown: str) -> bytes:
    text = row.get(field)
    if not isinstance(text, str):
        raise DataError(f"{shown} has no text in column {field!r}: name the column (it has {sorted(row)})")
    return text.encode()


def python_library(root: Path | None = None) -> list[bytes]:
    """Return the text of the Python standard library, one document a module (about 11 MB).

    Tests, installed packages and generated build settings are left out: they differ between installations of
    one Python. Modules come in the order of a hash of their names, so that the last part, which validates, is
    a sample of the whole.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_modules(root), key=lambda name: (xxhash.xxh3_64_intdigest(name.encode()), name))
    return [_whole(root / name) for name in names]


def _modules(root: Path) -> Iterator[str]:
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        place = Path(folder).relative_to(root)
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (place / name).as_posix()


def default_corpus(cache: Path | str, tokenizer: str = "bytes", *, again: bool = False) -> Path:
    """Return the token file of the standard library's text, made in `cache` unless it is there.

    Its name carries a digest of the text and of the tokenizer: another Python makes another file. again: make
    it even if it is there (it may be damaged).
    """
    texts = python_library()
    hasher = xxhash.xxh3_128(f"{FORMAT} {tokenizer_digest(tokenizer)}".encode())
    for text in texts:
        hasher.update(len(text).to_bytes(8, "little") + text)
    path = Path(cache).expanduser() / f"python-{hasher.hexdigest()[:16]}.bin"
    if again or not (path.is_file() and header_path(path).is_file()):
        write_tokens(load_tokenizer(tokenizer), texts, path)
    return path
