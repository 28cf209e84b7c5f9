"""What a user may choose about the model, the data, the inner optimizer and the evaluation.

Sections `[model]`, `[data]`, `[optimizer]` and `[evaluate]` of a run's TOML file. Nothing here imports torch:
the configuration, the syncer and the command line read these classes too. Types and ranges are checked by
msgspec when options are decoded; `check` checks them again for options made in Python, and the rules between
fields.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from archipel.errors import ConfigError, DataError

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Kind = Literal["decoder", "llama", "gemma", "moe", "vit"]

FEEDFORWARD_MULTIPLE = 16


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[model]`. "decoder" is built in; the other kinds come from transformers (extra `hf`)."""

    kind: Kind = "decoder"
    vocabulary: Natural = 0  # entries of the embedding; 0: as many as the data has
    width: Positive = 64
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Natural = 0  # key-value heads of grouped-query attention; 0: as many as heads
    feedforward: Natural = 0  # inner width of the MLP; 0: 8/3 of width (vit: 4 times), to a multiple of 16
    sequence: Natural = 0  # longest context in tokens; 0: that of the data
    tied: bool = True  # output head shares the token embedding
    rope_theta: Annotated[float, Meta(gt=0)] = 10_000.0  # base of the rotary frequencies
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-6
    experts: Positive = 8  # moe: experts per layer
    experts_per_token: Positive = 2  # moe: experts each token is routed to
    router_loss: NonNegative = 0.01  # moe: weight of the load-balancing loss in training
    image: Positive = 8  # vit: side of the square image in pixels
    patch: Positive = 2  # vit: side of a patch in pixels
    channels: Positive = 1  # vit
    classes: Positive = 10  # vit
    seed: Natural = 0  # initial weights


class DataOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[data]`. A token is a token of text, or one image for `source = "digits"`."""

    source: Literal["tokens", "digits"] = "tokens"
    path: str = ""  # token file of `archipel data prepare`; "": text of the Python standard library
    tokenizer: str = ""  # "bytes" or a tokenizers JSON; "": what the file was made with, else bytes
    sequence: Positive = 128  # tokens per window
    batch: Positive = 8  # windows (or images) per inner step, over all micro-batches
    shards: Positive = 64  # disjoint parts the data is dealt into; at least the number of learners
    valid_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.05  # last part, kept for validation
    seed: Natural = 0  # order of the windows
    cache: str = "~/.cache/archipel"  # directory of the default corpus
    verify: bool = True  # compare the whole file with its checksum when it is opened


class OptimizerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[optimizer]`: the inner AdamW and its schedule over the run's ticks."""

    lr: NonNegative = 3e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.1  # on tensors of two or more dimensions only
    clip: NonNegative = 1.0  # largest gradient norm; 0: no clipping
    warmup_steps: Natural = 20
    schedule: Literal["cosine", "constant"] = "cosine"
    final_share: Share = 0.1  # of lr, at the end of the cosine
    accumulate: Positive = 1  # micro-batches an inner step is split into


class EvaluateOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[evaluate]`: validation of the merged model."""

    every_rounds: Positive = 24
    batches: Positive = 8
    batch: Positive = 16  # windows (or images) per batch


def check(section: str, options: Struct) -> None:
    """Raise ConfigError if options of `[section]` break a range or a rule between fields."""
    try:
        msgspec.convert(msgspec.to_builtins(options), type(options))
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}] {error}") from None
    for broken in _broken_rules(options):
        raise ConfigError(f"{section}.{broken}")


def _broken_rules(options: Struct) -> list[str]:
    if not isinstance(options, ModelOptions):
        return []
    if options.kind == "vit":
        return _broken_image_rules(options)
    return _broken_text_rules(options)


def kv_heads(options: ModelOptions) -> int:
    """Return the number of key-value heads."""
    return options.kv_heads or options.heads


def feedforward(options: ModelOptions) -> int:
    """Return the inner width of the MLP. At 8/3, a gated MLP's three matrices cost what two cost at 4."""
    if options.feedforward:
        return options.feedforward
    wanted = 4 * options.width if options.kind == "vit" else -(-8 * options.width // 3)
    return -(-wanted // FEEDFORWARD_MULTIPLE) * FEEDFORWARD_MULTIPLE


def fit(options: ModelOptions, data: DataOptions, vocabulary: int) -> ModelOptions:
    """Return the model options with what was left to the data filled in.

    vocabulary: entries of the data's tokenizer (classes for images). Raises DataError where the two differ.
    """
    if (options.kind == "vit") != (data.source == "digits"):
        raise DataError(
            f"model.kind={options.kind} cannot learn from data.source={data.source}: "
            "use vit with digits, any other kind with tokens"
        )
    if options.kind == "vit":
        return _fit_images(options, vocabulary)
    if options.vocabulary and options.vocabulary < vocabulary:
        raise DataError(
            f"model.vocabulary={options.vocabulary} is smaller than the data's {vocabulary} entries: "
            f"set it to 0 or to at least {vocabulary}"
        )
    if options.sequence and options.sequence < data.sequence:
        raise DataError(
            f"data.sequence={data.sequence} exceeds model.sequence={options.sequence}: "
            "set model.sequence to 0 or shorten data.sequence"
        )
    return msgspec.structs.replace(
        options,
        vocabulary=options.vocabulary or vocabulary,
        sequence=options.sequence or data.sequence,
    )


def _fit_images(options: ModelOptions, classes: int) -> ModelOptions:
    if options.classes < classes:
        raise DataError(
            f"model.classes={options.classes} is smaller than the data's {classes} classes: use {classes}"
        )
    if (options.image, options.channels) != (8, 1):
        raise DataError(
            f"model.image={options.image}, model.channels={options.channels}: the digits are 8 by 8 pixels "
            "in one channel; use model.image=8, model.channels=1"
        )
    return options


def _broken_text_rules(options: ModelOptions) -> list[str]:
    broken = []
    if options.width % options.heads:
        broken.append(f"width={options.width} is not a multiple of model.heads={options.heads}")
    elif (options.width // options.heads) % 2:
        size = options.width // options.heads
        broken.append(f"width/heads={size} is odd: rotary embedding turns pairs; use an even size per head")
    if options.heads % kv_heads(options):
        broken.append(f"heads={options.heads} is not a multiple of model.kv_heads={options.kv_heads}")
    if options.kind == "moe" and options.experts_per_token > options.experts:
        broken.append(
            f"experts_per_token={options.experts_per_token} exceeds model.experts={options.experts}"
        )
    return broken


def _broken_image_rules(options: ModelOptions) -> list[str]:
    broken = []
    if options.width % options.heads:
        broken.append(f"width={options.width} is not a multiple of model.heads={options.heads}")
    if options.image % options.patch:
        broken.append(f"image={options.image} is not a multiple of model.patch={options.patch}")
    return broken
