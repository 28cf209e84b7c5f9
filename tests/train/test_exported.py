"""What lies beside exported weights loads again: here, and in transformers as lm-eval loads it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from archipel.errors import DataError, ModelError
from archipel.train import corpus, models
from archipel.train.exported import folder_of, load_encoder, load_model, tokenizer_of, write_tokenizer
from archipel.train.options import DataOptions, ModelOptions

torch.set_num_threads(1)

TEXTS = [
    "plain",
    " two  spaces ",
    "é, 日本, 🙂",
    "\ttab\r\nend\n",
    "Ā is no NUL, nor is \x01",
    "<|endoftext|>",
]


def options_of(kind: str = "decoder", **changes: Any) -> ModelOptions:
    sizes = {
        "vocabulary": 300,
        "width": 32,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "sequence": 16,
        "experts": 4,
    }
    return ModelOptions(kind=kind, **{**sizes, **changes})  # type: ignore[arg-type]


def exported(folder: Path, options: ModelOptions, data: DataOptions | None = None) -> torch.nn.Module:
    """Export a fresh model and the tokenizer of its data; return the model."""
    model = models.build(options, 5)
    models.export(model.state_dict(), options, folder)
    if data is not None:
        write_tokenizer(data, options, folder)
    return model


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a token file with its tokenizer beside it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("the sky is blue, the grass is green\n" * 50)
    corpus.train_bpe(str(folder / "text.txt"), folder / "bpe.json", vocabulary=290)
    corpus.prepare(str(folder / "text.txt"), folder / "tokens.bin", tokenizer=str(folder / "bpe.json"))
    return folder / "tokens.bin"


def ids(encoder: corpus.Encoder, text: str) -> list[int]:
    return next(encoder.encode([text.encode()])).tolist()[:-1]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["decoder", "gemma", "moe"])
def test_transformers_encodes_bytes_as_the_data_was(kind: str, text: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported(tmp_path, options_of(kind), DataOptions())
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.encode(text) == list(text.encode()) == ids(load_encoder(tmp_path), text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token_id, len(loaded), loaded.model_max_length) == (0, 256, 16)


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_encodes_a_bpe_as_the_data_was(bpe: Path, text: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported(tmp_path, options_of(), DataOptions(path=str(bpe)))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.encode(text) == ids(load_encoder(tmp_path), text)
    assert loaded.eos_token == "<|endoftext|>"
    assert (tmp_path / "tokenizer.json").read_bytes() == bpe.with_name("bpe.json").read_bytes()


def test_tokenizer_is_found_by_option_or_beside_the_data(bpe: Path, tmp_path: Path) -> None:
    beside = str(bpe.with_name("bpe.json"))
    assert tokenizer_of(DataOptions()) == tokenizer_of(DataOptions(tokenizer="bytes")) == "bytes"
    assert tokenizer_of(DataOptions(tokenizer=beside, path="/elsewhere")) == beside
    assert tokenizer_of(DataOptions(path=str(bpe))) == beside
    for name in ("tokens.bin", "tokens.bin.json"):
        (tmp_path / name).write_bytes(bpe.with_name(name).read_bytes())
    with pytest.raises(DataError, match=r"was made with bpe.json, which is not beside it"):
        tokenizer_of(DataOptions(path=str(tmp_path / "tokens.bin")))
    (tmp_path / "bpe.json").write_text("{}")  # of that name, but another
    with pytest.raises(DataError, match="which is not beside it"):
        tokenizer_of(DataOptions(path=str(tmp_path / "tokens.bin")))
    with pytest.raises(DataError, match="not on this host"):
        tokenizer_of(DataOptions(tokenizer=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{}", "not a tokenizers JSON"),
        ("[", "not a tokenizers JSON"),
        ('{"model": {"vocab": {"a": 0}}}', "no token to separate"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_not_exported(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match=rule):
        write_tokenizer(DataOptions(tokenizer=str(tmp_path / "t.json")), options_of(), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["decoder", "llama", "gemma", "moe"])
def test_exported_model_gives_the_same_logits(kind: str, tied: bool, tmp_path: Path) -> None:
    if kind != "decoder":
        pytest.importorskip("transformers")
    model = exported(tmp_path, options_of(kind, tied=tied)).eval()
    loaded = load_model(tmp_path)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(models.logits(loaded.model, tokens), models.logits(model, tokens))
    assert (loaded.vocabulary, loaded.context_max) == (300, 16)
    assert isinstance(loaded.model, models.Decoder) == (kind in ("decoder", "llama"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
        {"hidden_act": "gelu"},
        {"head_dim": 16},
    ],
)
def test_a_llama_that_the_decoder_is_not_goes_to_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 4, "max_position_embeddings": 16}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(models.logits(loaded.model, tokens), models.logits(model, tokens))
    assert not isinstance(loaded.model, models.Decoder)


def test_decoder_and_bytes_load_without_transformers_and_tokenizers(tmp_path: Path) -> None:
    exported(tmp_path, options_of(), DataOptions())
    code = (
        "import sys; from pathlib import Path; sys.modules.update(transformers=None, tokenizers=None)\n"
        f"from archipel.train import exported; folder = Path({str(tmp_path)!r})\n"
        "print(exported.load_model(folder).vocabulary, exported.load_encoder(folder).name)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["300", "bytes"]


def test_folder_of_a_run_or_of_weights(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match=r"model has no config.json: the run has not finished"):
        folder_of(tmp_path)
    save_file({"mine": torch.ones(2)}, tmp_path / "model" / "weights.safetensors")
    with pytest.raises(ModelError, match="holds the weights of a model of your own"):
        folder_of(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert folder_of(tmp_path) == folder_of(tmp_path / "model") == tmp_path / "model"
    with pytest.raises(ModelError, match="no model at"):
        folder_of(tmp_path / "nowhere")


def test_weights_of_another_model_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    exported(tmp_path, options_of())
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"is not of config.json's model"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**described, "vocab_size": 301}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="does not describe a model: KeyError"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_model_without_text_and_folder_without_tokenizer_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    exported(tmp_path, ModelOptions(kind="vit", width=32, layers=1))
    with pytest.raises(ModelError, match="of type vit, which has no text to score"):
        load_model(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer.json: name the tokenizer with --tokenizer"):
        load_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizers JSON file"):
        load_encoder(tmp_path)
