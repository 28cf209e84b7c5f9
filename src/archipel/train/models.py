"""Models to train: the built-in decoder, and architectures of transformers made from sizes.

The built-in decoder is Llama's architecture (RMSNorm, rotary embedding, SwiGLU, grouped-query attention). Its
parameters carry the names of transformers' `LlamaForCausalLM`, so what `export` writes loads there with
`from_pretrained` and gives the same logits; it starts in milliseconds because transformers is never imported.

Invariants: `build` gives the same weights for the same options and seed, and leaves torch's global random
state as it was. `summed_loss` works for every kind, and is a sum, so that losses of micro-batches add up.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from archipel.errors import ModelError
from archipel.train.options import ModelOptions, check, feedforward, kv_heads

IGNORED = -100  # a target that counts neither in the loss nor as a token
INITIAL_DEVIATION = 0.02


class Batch(NamedTuple):
    """What one loss is computed from.

    Text: inputs (windows, sequence) int64, targets the same shape. Images: inputs (images, channels, side,
    side) float32 in 0…1, targets (images,) int64. A target of `IGNORED` is padding.
    """

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return Batch(self.inputs.to(device), self.targets.to(device))


class Rotary:
    """Tables of the rotary embedding, made when first asked for.

    Not a module and no buffers: the tables follow from the options, there is nothing to synchronise or save.
    """

    def __init__(self, size: int, theta: float) -> None:
        self._size, self._theta = size, theta
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, each (sequence, size), for `like` (windows, sequence, width)."""
        length = like.shape[1]
        held = self._tables.get((like.device, like.dtype))
        if held is None or held[0].shape[0] < length:
            held = self._tables[like.device, like.dtype] = self._make(length, like)
        return held[0][:length], held[1][:length]

    def _make(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self._size, 2, dtype=torch.float32) / self._size
        angle = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / self._theta**exponent)
        cosine, sine = angle.cos(), angle.sin()
        # The first half of a head is turned by −sin of the second, the second by +sin of the first.
        tables = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return tables[0].to(like), tables[1].to(like)


def rotate(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return heads (windows, heads, sequence, size) turned by their position. Swapping halves is a roll."""
    cosine, sine = tables
    return torch.addcmul(heads * cosine, heads.roll(heads.shape[-1] // 2, -1), sine)


class Linear(nn.Linear):
    """A linear map without bias. `build` fills its weights: torch's own start costs global random numbers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the weights as allocated."""


class Embedding(nn.Embedding):
    """A token embedding whose weights `build` fills."""

    def reset_parameters(self) -> None:
        """Leave the weights as allocated."""


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.size = options.width // options.heads
        self.grouped = kv_heads(options) != options.heads
        inner = kv_heads(options) * self.size
        self.q_proj = Linear(options.width, options.width)
        self.k_proj = Linear(options.width, inner)
        self.v_proj = Linear(options.width, inner)
        self.o_proj = Linear(options.width, options.width)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        query = rotate(self._split(self.q_proj(hidden)), tables)
        key = rotate(self._split(self.k_proj(hidden)), tables)
        value = self._split(self.v_proj(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, projected: Tensor) -> Tensor:
        """(windows, sequence, heads·size) → (windows, heads, sequence, size)."""
        return projected.unflatten(-1, (-1, self.size)).transpose(1, 2)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        inner = feedforward(options)
        self.gate_proj = Linear(options.width, inner)
        self.up_proj = Linear(options.width, inner)
        self.down_proj = Linear(inner, options.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.self_attn = Attention(options)
        self.mlp = GatedMLP(options)
        self.input_layernorm = Norm(options.width, options.norm_eps)
        self.post_attention_layernorm = Norm(options.width, options.norm_eps)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Trunk(nn.Module):
    """Everything but the output head."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.embed_tokens = Embedding(options.vocabulary, options.width)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.norm = Norm(options.width, options.norm_eps)
        self.rotary = Rotary(options.width // options.heads, options.rope_theta)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        tables = self.rotary.tables(hidden)
        for layer in self.layers:
            hidden = layer(hidden, tables)
        return self.norm(hidden)


class Decoder(nn.Module):
    """The built-in language model. Made by `build`, which also gives it its initial weights."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.model = Trunk(options)
        self.lm_head = Linear(options.width, options.vocabulary)
        self.sequence = options.sequence
        if options.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (windows, sequence, vocabulary) for tokens (windows, sequence)."""
        if self.sequence and tokens.shape[1] > self.sequence:
            raise ModelError(
                f"{tokens.shape[1]} tokens exceed model.sequence={self.sequence}: shorten the window"
            )
        return self.lm_head(self.model(tokens))


def build(options: ModelOptions, seed: int | None = None) -> nn.Module:
    """Return a new model on the CPU in float32, its weights drawn from the seed (else from `options.seed`).

    Raises ConfigError for sizes that do not fit together, ModelError if the kind needs a missing extra.
    """
    check("model", options)
    if options.kind != "vit" and not options.vocabulary:
        raise ModelError("model.vocabulary=0 means the data's: fill it in with archipel.train.options.fit")
    seed = options.seed if seed is None else seed
    if options.kind == "decoder":
        return _build_decoder(options, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _zoo(options)


def _build_decoder(options: ModelOptions, seed: int) -> Decoder:
    model = Decoder(options)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # each once, in a fixed order
        _initialise(name, parameter.data, options.layers, generator)
    return model


def _initialise(name: str, weight: Tensor, layers: int, generator: torch.Generator) -> None:
    if weight.dim() < 2:
        weight.fill_(1.0)
        return
    deviation = INITIAL_DEVIATION
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * layers) ** 0.5  # keeps the residual stream's size apart from depth, as GPT-2 does
    weight.normal_(0.0, deviation, generator=generator)


def _zoo(options: ModelOptions) -> nn.Module:
    """Return a model of transformers, weights drawn from torch's global random state."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"model.kind={options.kind} needs transformers ({error}): pip install -e '.[hf]' in a checkout"
        ) from error
    make: dict[str, Callable[[Any, ModelOptions], nn.Module]] = {
        "llama": _llama,
        "gemma": _gemma,
        "moe": _mixture,
        "vit": _vision,
    }
    return make[options.kind](transformers, options)


def _text_sizes(options: ModelOptions) -> dict[str, Any]:
    """Return what the text configurations of transformers have in common."""
    return {
        "vocab_size": options.vocabulary,
        "hidden_size": options.width,
        "intermediate_size": feedforward(options),
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": kv_heads(options),
        "head_dim": options.width // options.heads,
        "max_position_embeddings": options.sequence or 2048,
        "rms_norm_eps": options.norm_eps,
        "tie_word_embeddings": options.tied,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,  # a padding entry would get no gradient, and byte 0 is a token here
    }


def _rope(options: ModelOptions) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": options.rope_theta}


def _llama(transformers: Any, options: ModelOptions) -> nn.Module:
    config = transformers.LlamaConfig(**_text_sizes(options), rope_parameters=_rope(options))
    return transformers.LlamaForCausalLM(config)


def _gemma(transformers: Any, options: ModelOptions) -> nn.Module:
    """Gemma 3, text only; its own two rotary bases."""
    config = transformers.Gemma3TextConfig(
        **_text_sizes(options),
        query_pre_attn_scalar=options.width // options.heads,
        sliding_window=max(1, (options.sequence or 2048) // 2),
    )
    return transformers.Gemma3ForCausalLM(config)


def _mixture(transformers: Any, options: ModelOptions) -> nn.Module:
    """Qwen3's mixture of experts: every layer routed, `feedforward` is the width of one expert."""
    config = transformers.Qwen3MoeConfig(
        **_text_sizes(options),
        rope_parameters=_rope(options),
        moe_intermediate_size=feedforward(options),
        num_experts=options.experts,
        num_experts_per_tok=options.experts_per_token,
        norm_topk_prob=True,
        router_aux_loss_coef=options.router_loss,
        output_router_logits=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _vision(transformers: Any, options: ModelOptions) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=feedforward(options),
        image_size=options.image,
        patch_size=options.patch,
        num_channels=options.channels,
        num_labels=options.classes,
    )
    return transformers.ViTForImageClassification(config)


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return (…, classes) from our models and from those of transformers."""
    return _scores(model(inputs))


def _scores(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter is; batches go there."""
    return next(model.parameters()).device


def token_count(batch: Batch) -> int:
    """Return how many targets of the batch count."""
    return int((batch.targets != IGNORED).sum())


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the cross-entropies (nats) over the batch's tokens, as a 0-d tensor with a gradient.

    In training a router's balancing loss is added, times the number of tokens: the mean then carries it once.
    """
    output = model(batch.inputs)
    total = cross_entropy(_scores(output), batch.targets)
    balance = getattr(output, "aux_loss", None)
    if balance is None or not model.training:
        return total
    return total + model.config.router_aux_loss_coef * balance * token_count(batch)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over targets, in float32. scores: (…, classes), targets: (…) int64."""
    return F.cross_entropy(
        scores.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss per token. A batch of padding alone has loss 0."""
    return summed_loss(model, batch) / max(1, token_count(batch))


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; shared storage counts once."""
    distinct = {
        (p.untyped_storage()._cdata, p.storage_offset(), tuple(p.shape)): p.numel()
        for p in model.parameters()
    }
    return sum(distinct.values())


def export(state: Mapping[str, Tensor], options: ModelOptions, directory: Path | str) -> None:
    """Write config.json and model.safetensors, to be loaded by transformers' `from_pretrained`.

    state: tensors by parameter name; of tied weights either or both. Each file appears whole or not at all,
    the weights last. Raises ModelError where the state is not that of the model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".export-") as temporary:
        if options.kind in ("decoder", "llama"):
            _write_llama(_checked_llama(state, options), options, Path(temporary))
        else:
            _write_zoo(state, options, Path(temporary))
        for path in sorted(
            Path(temporary).iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)
        ):
            with path.open("rb") as written:
                os.fsync(written.fileno())
            path.replace(directory / path.name)


def _checked_llama(state: Mapping[str, Tensor], options: ModelOptions) -> dict[str, Tensor]:
    """Return the tensors to write, each with storage of its own."""
    check("model", options)
    expected = {name: tensor.shape for name, tensor in Decoder(options).state_dict().items()}
    held = dict(state)
    if options.tied:
        expected.pop("lm_head.weight")
        head = held.pop("lm_head.weight", None)
        held.setdefault("model.embed_tokens.weight", head)  # type: ignore[arg-type]
        if head is not None and not torch.equal(head, held["model.embed_tokens.weight"]):
            raise ModelError("model.tied=true but lm_head.weight differs from model.embed_tokens.weight")
    _require_same_names(set(held), set(expected))
    for name, shape in expected.items():
        if held[name].shape != shape:
            raise ModelError(
                f"cannot export {name}: shape {tuple(held[name].shape)}, options say {tuple(shape)}"
            )
    return {name: held[name].detach().cpu().contiguous().clone() for name in expected}


def _require_same_names(held: set[str], expected: set[str]) -> None:
    if held != expected:
        missing, extra = sorted(expected - held), sorted(held - expected)
        raise ModelError(f"cannot export: the state lacks {missing[:4]} and has unknown {extra[:4]}")


def _write_llama(tensors: dict[str, Tensor], options: ModelOptions, directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": options.rope_theta,  # read by transformers 4
        "rope_parameters": _rope(options),  # read by transformers 5
        "dtype": str(tensors["model.norm.weight"].dtype).removeprefix("torch."),
        **_text_sizes(options),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_zoo(state: Mapping[str, Tensor], options: ModelOptions, directory: Path) -> None:
    model = build(options)
    try:
        missing, extra = model.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise ModelError(f"cannot export: {error}") from error
    tied = set(getattr(model, "all_tied_weights_keys", ()) or ())
    _require_same_names(set(extra), set(missing) - tied)
    model.save_pretrained(directory)
