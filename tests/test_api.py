"""The public names, and the initial weights of a user's own model."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import archipel
from archipel.errors import ConfigError, ModelError
from archipel.protocol.schedule import SyncOptions
from archipel.roles.syncer import initial_weights

torch.set_num_threads(1)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, archipel; archipel.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there_and_others_are_not() -> None:
    assert all(getattr(archipel, name) for name in archipel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = archipel.nonsense


def test_saved_weights_are_what_a_syncer_starts_from(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(7.0)
    model[0].bias.requires_grad_(False)
    archipel.save_weights(model, tmp_path / "init.safetensors")
    schema, weights, _ = initial_weights(archipel_config(), str(tmp_path / "init.safetensors"))
    kinds = {spec.name: spec.kind for spec in schema}
    assert kinds == {
        "0.weight": "parameter", "1.weight": "parameter", "1.bias": "parameter",
        "1.running_mean": "buffer", "1.running_var": "buffer",
    }  # fmt: skip
    assert (weights["1.running_mean"] == 7.0).all()
    assert torch.equal(torch.from_numpy(weights["0.weight"]), model[0].weight.detach())


def test_options_decide_what_is_saved(tmp_path) -> None:
    options = SyncOptions(buffers="local", exclude=("0.*",))
    archipel.save_weights(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), tmp_path / "i.safetensors", options
    )
    schema, _, _ = initial_weights(archipel_config(), str(tmp_path / "i.safetensors"))
    assert {spec.name for spec in schema} == {"1.weight", "1.bias"}


def test_weights_that_are_not_finite_are_refused(tmp_path) -> None:
    model = nn.Linear(2, 2)
    model.weight.data[0, 0] = float("nan")
    archipel.save_weights(model, tmp_path / "i.safetensors")
    with pytest.raises(ModelError, match="tensor 'weight' holds NaN or Inf"):
        initial_weights(archipel_config(), str(tmp_path / "i.safetensors"))


def archipel_config():
    from archipel.config import Config

    return Config()


@pytest.mark.parametrize("use", [lambda learner: learner.step(1), lambda learner: learner.done])
def test_learner_works_inside_with_only(use, tmp_path) -> None:
    learner = archipel.Learner(nn.Linear(1, 1), None, syncer="127.0.0.1:1", out=tmp_path)
    with pytest.raises(ConfigError, match="works inside `with`"):
        use(learner)
