"""What a run leaves beside its weights, so that others can put text to the model."""

from pathlib import Path

import pytest
import torch

from archipel.roles.result import export
from archipel.train import models
from archipel.train.exported import load_encoder, load_model
from archipel.train.options import DataOptions, ModelOptions

SIZES = ModelOptions(width=16, layers=1, heads=2, vocabulary=256, sequence=32)


def test_model_is_exported_with_the_tokenizer_of_its_data(tmp_path: Path) -> None:
    export(dict(models.build(SIZES).state_dict()), SIZES, tmp_path / "model", data=DataOptions())
    assert load_encoder(tmp_path / "model").name == "bytes"
    assert load_model(tmp_path / "model").context_max == 32


def test_host_without_the_tokenizer_exports_the_weights_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataOptions(path=str(tmp_path / "on_another_host.bin"))
    export(dict(models.build(SIZES).state_dict()), SIZES, tmp_path / "model", data=data)
    assert load_model(tmp_path / "model").vocabulary == 256
    assert "exported without a tokenizer" in caplog.text and "on_another_host.bin" in caplog.text
    assert not list((tmp_path / "model").glob("tokenizer*"))


def test_weights_of_a_users_own_model_get_no_tokenizer(tmp_path: Path) -> None:
    export({"mine": torch.ones(2)}, SIZES, tmp_path / "model", data=DataOptions())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["weights.safetensors"]
