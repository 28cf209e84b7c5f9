"""Models: deterministic starts, the names and logits of transformers' Llama, one loss for every kind."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from archipel.errors import ConfigError, ModelError
from archipel.train import models
from archipel.train.models import IGNORED, Batch
from archipel.train.options import ModelOptions, check, feedforward

torch.set_num_threads(1)

TINY = {
    "vocabulary": 50,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feedforward": 48,
    "sequence": 16,
}
ZOO = ("llama", "gemma", "moe")


def tiny(**changes):
    return ModelOptions(**{**TINY, **changes})


def text_batch(windows=3, sequence=16, seed=0):
    tokens = torch.randint(0, 50, (windows, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def image_batch():
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.rand(4, 1, 8, 8, generator=generator), torch.tensor([0, 3, 9, 1]))


def batch_for(kind):
    return image_batch() if kind == "vit" else text_batch()


def options_for(kind):
    if kind == "vit":
        return ModelOptions(kind="vit", width=32, layers=1)
    return tiny(kind=kind, experts=4)


@pytest.mark.parametrize("kind", ["decoder", "llama", "vit"])
def test_same_seed_same_weights_and_global_randomness_untouched(kind):
    if kind != "decoder":
        pytest.importorskip("transformers")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, two, other = (models.build(options_for(kind), seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_seed_comes_from_the_options_unless_given():
    one, two = models.build(tiny(seed=9)), models.build(tiny(seed=1), 9)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_first_loss_is_that_of_a_guess():
    guess = float(torch.log(torch.tensor(50.0)))
    assert models.loss(models.build(tiny(), 0), text_batch()).item() == pytest.approx(guess, abs=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_by_head_and_shared_once(tied):
    #          embedding  heads: q+o     k+v          MLP           norms
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    wanted = 50 * 32 * (1 if tied else 2) + 2 * layer + 32
    assert models.parameter_count(models.build(tiny(tied=tied), 0)) == wanted


def test_a_token_sees_only_those_before_it():
    model, tokens = models.build(tiny(), 0), text_batch().inputs
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :9], two[:, :9])
    assert not torch.allclose(one[:, 9:], two[:, 9:])


def test_short_windows_agree_with_the_start_of_long_ones():
    """The rotary tables grow with need; what was made for a short window stays right."""
    model, tokens = models.build(tiny(), 0), text_batch().inputs
    short = model(tokens[:, :5])
    torch.testing.assert_close(short, model(tokens)[:, :5], atol=1e-6, rtol=1e-5)


def test_order_of_tokens_matters():
    model = models.build(tiny(), 0)
    assert not torch.allclose(
        model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]
    )


def test_window_longer_than_the_context_is_refused():
    with pytest.raises(ModelError, match=r"20 tokens exceed model.sequence=16"):
        models.build(tiny(), 0)(torch.zeros(1, 20, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "width=32 is not a multiple of model.heads=5"),
        ({"kv_heads": 3}, "heads=4 is not a multiple of model.kv_heads=3"),
        ({"width": 12}, "width/heads=3 is odd"),
        ({"kind": "moe", "experts": 1}, "experts_per_token=2 exceeds model.experts=1"),
        ({"kind": "vit", "image": 9}, "image=9 is not a multiple of model.patch=2"),
        ({"layers": 0}, r"\[model\].*layers"),
        ({"kind": "rnn"}, r"\[model\].*kind"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check("model", tiny(**changes))


def test_vocabulary_must_be_known():
    with pytest.raises(ModelError, match="vocabulary=0"):
        models.build(tiny(vocabulary=0))


def test_feedforward_is_derived_from_width():
    assert feedforward(ModelOptions(width=64)) == 176  # 8/3 · 64 = 170.7, to the next multiple of 16
    assert feedforward(ModelOptions(kind="vit", width=32)) == 128


def test_the_decoder_needs_no_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from archipel.train import models; from archipel.train.options import ModelOptions\n"
        "print(models.parameter_count(models.build(ModelOptions(vocabulary=50), 0)))\n"
        "try: models.build(ModelOptions(kind='llama', vocabulary=50), 0)\n"
        "except models.ModelError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0].isdigit()
    assert "pip install -e '.[hf]'" in ran.stdout


def test_options_need_no_torch():
    code = (
        "import sys; import archipel.train.options, archipel.train.corpus; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["decoder", *ZOO, "vit"])
def test_every_kind_gives_a_loss_and_gradients(kind):
    if kind != "decoder":
        pytest.importorskip("transformers")
    model, batch = models.build(options_for(kind), 0), batch_for(kind)
    loss = models.loss(model, batch)
    loss.backward()
    assert loss.dim() == 0 and loss.isfinite()
    graded = [p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()]
    assert all(graded)


def test_padding_does_not_count():
    model, batch = models.build(tiny(), 0), text_batch()
    padded = Batch(batch.inputs, batch.targets.clone())
    padded.targets[:, 10:] = IGNORED
    short = Batch(batch.inputs[:, :10], batch.targets[:, :10])
    assert models.token_count(padded) == 30
    torch.testing.assert_close(models.loss(model, padded), models.loss(model, short), atol=1e-6, rtol=1e-5)
    padded.targets[:] = IGNORED
    assert models.loss(model, padded).item() == 0.0


def test_router_loss_counts_in_training_only():
    pytest.importorskip("transformers")
    model = models.build(tiny(kind="moe", experts=4, router_loss=0.5), 0)
    batch = text_batch()
    plain = models.cross_entropy(models.logits(model, batch.inputs), batch.targets).item() / 48
    balance = model(batch.inputs).aux_loss.item()
    assert models.loss(model, batch).item() == pytest.approx(plain + 0.5 * balance, rel=1e-5)
    assert models.loss(model.eval(), batch).item() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_export_loads_as_llama_with_equal_names_and_logits(kind, tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = tiny(kind=kind, tied=tied, rope_theta=500.0, norm_eps=1e-5)
    model = models.build(options, 3).eval()
    models.export(model.state_dict(), options, tmp_path)
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert set(loaded.state_dict()) == set(model.state_dict())
    tokens = text_batch().inputs
    torch.testing.assert_close(
        loaded.eval()(tokens).logits, models.logits(model, tokens), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["gemma", "moe", "vit"])
def test_export_of_the_zoo_loads_with_equal_logits(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    options, batch = options_for(kind), batch_for(kind)
    model = models.build(options, 3).eval()
    models.export(model.state_dict(), options, tmp_path)
    vision, text = transformers.AutoModelForImageClassification, transformers.AutoModelForCausalLM
    loaded = (vision if kind == "vit" else text).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(batch.inputs).logits, models.logits(model, batch.inputs))


def test_export_leaves_the_two_files_and_nothing_else(tmp_path):
    models.export(models.build(tiny(), 0).state_dict(), tiny(), tmp_path / "deep" / "er")
    models.export(models.build(tiny(), 1).state_dict(), tiny(), tmp_path / "deep" / "er")
    written = sorted(path.name for path in (tmp_path / "deep" / "er").iterdir())
    assert written == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "deep" / "er" / "config.json").read_text())["model_type"] == "llama"


def test_export_takes_tied_weights_under_either_name(tmp_path):
    state = dict(models.build(tiny(), 0).state_dict())
    head = state.pop("lm_head.weight")
    models.export(state, tiny(), tmp_path)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    models.export(state, tiny(), tmp_path)
    with pytest.raises(ModelError, match=r"lm_head.weight differs"):
        models.export({**state, "model.embed_tokens.weight": head + 1}, tiny(), tmp_path)


def test_export_of_another_model_is_refused_and_changes_nothing(tmp_path):
    state = dict(models.build(tiny(), 0).state_dict())
    lacking = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"lacks.*model.norm.weight"):
        models.export(lacking, tiny(), tmp_path)
    with pytest.raises(ModelError, match=r"unknown.*stranger"):
        models.export({**state, "stranger": torch.ones(1)}, tiny(), tmp_path)
    with pytest.raises(ModelError, match=r"model.norm.weight: shape"):
        models.export({**state, "model.norm.weight": torch.ones(3)}, tiny(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_logits_match_attention_written_out():
    """One layer by the formulas: repeated key-value heads, rotation by pairs, a causal softmax."""
    options = tiny(layers=1)
    model = models.build(options, 0)
    layer, tokens = model.model.layers[0], text_batch(1, 6).inputs
    hidden = model.model.embed_tokens(tokens)
    normed = layer.input_layernorm(hidden)[0]  # (6, 32)
    angle = torch.arange(6.0)[:, None] / 10_000.0 ** (torch.arange(0, 8, 2.0) / 8)

    def turned(vector):  # (6, 8): the pair (i, i + 4) turned by the angle of its position
        a, b = vector[:, :4], vector[:, 4:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    heads = []
    for head in range(4):
        mine, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
        query = turned(normed @ layer.self_attn.q_proj.weight[mine].T)
        key = turned(normed @ layer.self_attn.k_proj.weight[shared].T)
        score = (query @ key.T / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        heads.append(score.softmax(-1) @ (normed @ layer.self_attn.v_proj.weight[shared].T))
    after = hidden[0] + torch.cat(heads, -1) @ layer.self_attn.o_proj.weight.T
    mlp, inner = layer.mlp, layer.post_attention_layernorm(after)
    after = (
        after
        + (F.silu(inner @ mlp.gate_proj.weight.T) * (inner @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    )
    wanted = model.model.norm(after) @ model.lm_head.weight.T
    torch.testing.assert_close(model(tokens)[0], wanted, atol=1e-6, rtol=1e-4)
