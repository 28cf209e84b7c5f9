"""A folder of exported weights: the tokenizer put beside them, and both loaded again.

`models.export` writes the weights; what is written here lets transformers' `AutoTokenizer` encode text as the
run's data was encoded, so that other programs (lm-eval) can use the folder. A tokenizer of the `tokenizers`
library is copied byte for byte. Bytes become a byte-level BPE without merges, whose token b is byte b.

Invariant: both load without transformers where the weights are of Llama's plain architecture, and without
`tokenizers` where the tokens are bytes.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import ConfigError, DataError, ModelError
from . import models
from .corpus import SEPARATORS, Encoder, load_tokenizer, open_tokens, tokenizer_digest
from .options import DataOptions, ModelOptions

TOKENIZER = "tokenizer.json"
NUL = "\0"


class Loaded(NamedTuple):
    """A model in evaluation mode on the CPU, its entries, and the longest context it takes, in tokens."""

    model: nn.Module
    vocabulary: int
    context_max: int


def write_tokenizer(data: DataOptions, model: ModelOptions, folder: Path) -> None:
    """Write the tokenizer that a run's data was made with, as `AutoTokenizer.from_pretrained` loads it.

    Raises DataError where this host does not have it.
    """
    source = tokenizer_of(data)
    held = json.dumps(_byte_tokenizer()).encode() if source == "bytes" else Path(source).read_bytes()
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": NUL if source == "bytes" else _separator(source),
        "model_max_length": model.sequence,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer_config.json": json.dumps(described, indent=2).encode() + b"\n", TOKENIZER: held}
    for name, content in files.items():
        temporary = folder / f".{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(folder / name)


def tokenizer_of(data: DataOptions) -> str:
    """Return "bytes", or the file of the tokenizer that made the run's data.

    Looked for: where `data.tokenizer` says, else beside the token file. DataError if it is not there.
    """
    if data.tokenizer or not data.path:
        wanted = data.tokenizer or "bytes"
        if wanted != "bytes" and not Path(wanted).expanduser().is_file():
            raise DataError(f"data.tokenizer={wanted} is not on this host")
        return wanted if wanted == "bytes" else str(Path(wanted).expanduser())
    header = open_tokens(data.path, verify=False).header
    if header.tokenizer_digest == "bytes":
        return "bytes"
    beside = Path(data.path).expanduser().with_name(header.tokenizer)
    if not beside.is_file() or tokenizer_digest(str(beside)) != header.tokenizer_digest:
        raise DataError(
            f"{data.path} was made with {header.tokenizer}, which is not beside it: set data.tokenizer"
        )
    return str(beside)


def _byte_tokenizer() -> dict[str, Any]:
    """Return a `tokenizers` JSON that encodes text without NUL as "bytes" does: token b for byte b."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    separator = {"id": 0, "content": NUL, "special": True, **dict.fromkeys(flags, False)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [separator],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": _byte_entries(), "merges": []},
    }


def _byte_entries() -> dict[str, int]:
    """Return the character that the ByteLevel pre-tokenizer writes for each byte; NUL is itself."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    entries = {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    return {NUL if byte == 0 else entry: byte for entry, byte in entries.items()}


def _separator(path: str) -> str:
    """Return what separates documents, of a `tokenizers` JSON: the one that `load_tokenizer` takes."""
    try:
        held = json.loads(Path(path).read_text())
        vocabulary = held["model"]["vocab"]
        entries = set(vocabulary) if isinstance(vocabulary, dict) else {entry for entry, _ in vocabulary}
        entries |= {added["content"] for added in held.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a tokenizers JSON file: {error!r}") from None
    found = next((name for name in SEPARATORS if name in entries), None)
    if found is None:
        raise DataError(f"{path} has no token to separate documents: add one of {', '.join(SEPARATORS)}")
    return found


def folder_of(path: Path | str) -> Path:
    """Return the folder with the weights: that of a run folder, or the one given."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise ModelError(f"no model at {path}: give a run folder, or one with config.json and weights")
    folder = path / "model" if (path / "model").is_dir() else path
    if (folder / "config.json").is_file():
        return folder
    if (folder / "weights.safetensors").is_file():
        raise ModelError(
            f"{folder} holds the weights of a model of your own, which archipel cannot build: load them in "
            "your script and call archipel.train.choices.score"
        )
    raise ModelError(f"{folder} has no config.json: the run has not finished, or it is no exported model")


def load_encoder(folder: Path) -> Encoder:
    """Return what encodes text for the model of a folder. DataError if its tokenizer was not exported."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER}: name the tokenizer with --tokenizer (bytes, or a JSON file)"
        )
    try:
        entries = json.loads(path.read_text())["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a tokenizers JSON file: {error!r}") from None
    return load_tokenizer("bytes" if entries == _byte_entries() else str(path))


def load_model(folder: Path) -> Loaded:
    """Return the language model of a folder. Raises ModelError if it is none, or cannot be loaded."""
    try:
        described = json.loads((folder / "config.json").read_text())
        options = _plain_llama(described)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}/config.json does not describe a model: {error!r}") from None
    if options is None or not (folder / "model.safetensors").is_file():
        return _load_with_transformers(folder, described)
    try:
        model = models.build(options)
        found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    except (OSError, RuntimeError, SafetensorError, ConfigError) as error:
        raise ModelError(f"{folder} cannot be loaded: {error}") from None
    lacking = set(found.missing_keys) - ({"lm_head.weight"} if options.tied else set())
    if lacking or found.unexpected_keys:
        raise ModelError(f"{folder}: model.safetensors is not of config.json's model: {found}")
    return Loaded(model.eval(), options.vocabulary, options.sequence)


def _plain_llama(described: dict[str, Any]) -> ModelOptions | None:
    """Return the options of the built-in decoder that is this model, None where another one is needed."""
    rope = described.get("rope_parameters") or {}
    plain = (
        described.get("model_type") == "llama"
        and described.get("hidden_act", "silu") == "silu"
        and not described.get("attention_bias")
        and not described.get("mlp_bias")
        and not described.get("rope_scaling")
        and rope.get("rope_type", "default") == "default"
    )
    if not plain:
        return None
    heads, width = described["num_attention_heads"], described["hidden_size"]
    if (described.get("head_dim") or width // heads) != width // heads:
        return None
    return ModelOptions(
        vocabulary=described["vocab_size"],
        width=width,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        feedforward=described["intermediate_size"],
        sequence=described["max_position_embeddings"],
        tied=described.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta") or described.get("rope_theta") or 10_000.0),
        norm_eps=described.get("rms_norm_eps", 1e-6),
    )


def _load_with_transformers(folder: Path, described: dict[str, Any]) -> Loaded:
    kind = described.get("model_type")
    if "max_position_embeddings" not in described or "vocab_size" not in described:
        raise ModelError(f"{folder} holds a model of type {kind}, which has no text to score")
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"a model of type {kind} needs transformers: pip install -e '.[hf]' in a checkout"
        ) from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
    except Exception as error:  # whatever transformers, safetensors or torch may raise
        raise ModelError(f"{folder} cannot be loaded by transformers: {error}") from error
    return Loaded(model.eval(), described["vocab_size"], described["max_position_embeddings"])
