"""How much faster are models that a patch leaves exact than by transformers' own code, and how far off it?

In the sizes of the published models, with fewer layers, as all are alike, and random weights and inputs. In Longformer
and LED the first token sees all others, as for classification. Of several texts the shortest is half as long as the
longest. Parakeet is without the convolutions before its layers; Pixtral sees square images of one size. Both ways are
timed in one run, interleaved, forward and in a step of training with the published dropout (where that is 0.1 only in
attention: without), and their memory is taken. LongT5 is not trained, as its scores have biases that learn; nor is the
privacy filter, whose experts take nearly all of a step; nor what transformers has no memory for.

    python -m scripts.benchmark.exact_models       # writes benchmark_{longformer,relative_bias,pixtral}.json
    python -m scripts.benchmark.exact_models --models T5-base --repeats 1

It takes minutes on two cores. What the files hold is not measured again.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    Gemma2Config,
    Gemma2Model,
    LEDConfig,
    LEDModel,
    LongformerConfig,
    LongformerModel,
    LongT5Config,
    LongT5EncoderModel,
    MPNetConfig,
    MPNetModel,
    OpenAIPrivacyFilterConfig,
    OpenAIPrivacyFilterModel,
    ParakeetEncoder,
    ParakeetEncoderConfig,
    PegasusXConfig,
    PegasusXModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
)

from hf_effattn import patch_attention

from ..shared.command_line import check_names, run_with_help
from ._timing import Dtypes, Repeats, Rows, forward, measure_dtypes, time_models
from .attention import EXACT
from .models import TOKENS

BLOCKS = "in blocks"
TEXT = {"vocab_size": TOKENS}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0}
# Of the encoder; nothing calls the decoder.
SEQUENCE_TO_SEQUENCE = {
    "d_model": 768,
    "encoder_layers": 3,
    "encoder_ffn_dim": 3072,
    "encoder_attention_heads": 12,
    "decoder_layers": 1,
    "decoder_attention_heads": 12,
    "dropout": 0.0,
}


class Subsampled(nn.Module):
    """Frames as they come out of the convolutions that Parakeet begins with."""

    def forward(self, frames: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        """The frames, `(B, N, E)`."""
        return frames


def parakeet(config: Any) -> PreTrainedModel:
    """Its layers alone."""
    model = ParakeetEncoder(config)
    model.subsampling = Subsampled()
    return model


class Measured(NamedTuple):
    """A model, and on what it is timed.

    Attributes:
        file: of the results: one for each table.
        make: builds the model from its configuration.
        config: the class of that.
        sizes: what differs from its defaults.
        cases: texts or images, the length of the longest or the patches of one, and whether a step is timed.
    """

    file: str
    make: Callable[[Any], PreTrainedModel]
    config: Callable[..., Any]
    sizes: dict[str, Any]
    cases: tuple[tuple[int, int, bool], ...]


def alone(*lengths: int, trains: bool = True) -> tuple[tuple[int, int, bool], ...]:
    """Cases of one text."""
    return tuple((1, length, trains) for length in lengths)


MODELS = {
    "Longformer-base": Measured(
        "longformer", LongformerModel, LongformerConfig,
        TEXT | NO_DROPOUT | {"num_hidden_layers": 3, "hidden_dropout_prob": 0.0, "pad_token_id": 1}
        | {"max_position_embeddings": 4098},
        alone(512, 1024, 4096),
    ),
    "LED-base": Measured(
        "longformer", lambda config: LEDModel(config).get_encoder(), LEDConfig,
        TEXT | NO_DROPOUT | SEQUENCE_TO_SEQUENCE | {"attention_window": 1024},
        alone(4096, 16384),
    ),
    # Its first layer stays transformers' own.
    "LongT5-base": Measured(
        "longformer", LongT5EncoderModel, LongT5Config,
        TEXT | {"encoder_attention_type": "transient-global", "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
        | {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 2048, "num_layers": 6},
        alone(4096, 16384, trains=False),
    ),
    "Pegasus-X-base": Measured(
        "longformer", lambda config: PegasusXModel(config).get_encoder(), PegasusXConfig,
        TEXT | SEQUENCE_TO_SEQUENCE, alone(4096, 16384),
    ),
    "privacy-filter": Measured(
        "longformer", OpenAIPrivacyFilterModel, OpenAIPrivacyFilterConfig,
        TEXT | {"num_hidden_layers": 2, "pad_token_id": 1, "eos_token_id": 2},
        alone(640, 1024, 4096, trains=False),
    ),
    # One layer in two sees windows, of 4,096.
    "Gemma-2-2b": Measured(
        "longformer", partial(Gemma2Model._from_config, attn_implementation="eager"), Gemma2Config,
        TEXT | {"num_hidden_layers": 2}, alone(1024, 4096),
    ),
    "T5-base": Measured(
        "relative_bias", T5EncoderModel, T5Config,
        TEXT | {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 3},
        ((1, 512, True), (8, 512, True), (1, 2048, True), (1, 4096, True), (1, 8192, False)),
    ),
    "MPNet-base": Measured(
        "relative_bias", partial(MPNetModel, add_pooling_layer=False), MPNetConfig,
        TEXT | {"num_hidden_layers": 3, "max_position_embeddings": 514}, ((1, 512, True), (8, 512, True)),
    ),
    # By default of the size XL.
    "DeBERTa-v3-base": Measured(
        "relative_bias", DebertaV2Model, DebertaV2Config,
        TEXT | {"num_hidden_layers": 3, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
        | {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
        | {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        ((1, 512, True), (8, 512, True), (1, 2048, True), (1, 4096, False)),
    ),
    # Recordings of half a minute, two and six minutes.
    "Parakeet-0.6b": Measured(
        "relative_bias", parakeet, ParakeetEncoderConfig,
        {"num_hidden_layers": 3, "subsampling_factor": 1, "layerdrop": 0.0},
        ((1, 375, True), (8, 375, True), (1, 1500, True), (1, 4500, False)),
    ),
    # Of ten seconds, of half a minute, of one and a half.
    "w2v-bert-2.0": Measured(
        "relative_bias", Wav2Vec2BertModel, Wav2Vec2BertConfig,
        {"num_hidden_layers": 3, "apply_spec_augment": False, "layerdrop": 0.0},
        ((1, 500, True), (8, 500, True), (1, 1500, True), (1, 4500, False)),
    ),
    # 1,024 pixels a side, what the model was made for; small pictures, of which a prompt may have many; and what
    # Mistral Small 3.1 reads.
    "Pixtral-12B": Measured(
        "pixtral", PixtralVisionModel, PixtralVisionConfig, {"num_hidden_layers": 2},
        ((1, 64**2, True), (4, 64**2, False), (16, 16**2, True), (64, 16**2, False), (1, 110**2, False)),
    ),
}  # fmt: skip


def random_model(name: str, **sizes: Any) -> PreTrainedModel:
    """One of them, exact, with random weights; `sizes` are other settings."""
    torch.manual_seed(0)
    measured = MODELS[name]
    return measured.make(measured.config(**measured.sizes | sizes))


def inputs_for(model: PreTrainedModel, texts: int, length: int) -> dict[str, Any]:
    """Random inputs by the names that the model has for them."""
    draw, kind = torch.Generator().manual_seed(0), model.config.model_type
    if kind == "pixtral":
        pixels = round(length**0.5) * model.config.patch_size
        return {"pixel_values": torch.randn(texts, 3, pixels, pixels, generator=draw)}
    widths = {"parakeet_encoder": "hidden_size", "wav2vec2-bert": "feature_projection_input_dim"}
    if kind in widths:
        width = getattr(model.config, widths[kind])
        inputs = {"input_features": torch.randn(texts, length, width, generator=draw)}
    else:
        inputs = {"input_ids": torch.randint(3, TOKENS, (texts, length), generator=draw)}
    if kind in ("pegasus_x", "openai_privacy_filter"):
        return inputs
    if kind == "gemma2":
        return inputs | {"use_cache": False}
    lengths = torch.linspace(length, length // 2 if texts > 1 else length, texts).long()
    inputs["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    if kind in ("longformer", "led"):
        inputs["global_attention_mask"] = (torch.arange(length) < 1).long().expand(texts, -1)
    return inputs


def run(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden state of what is no padding; inputs that are no numbers of tokens in the model's precision."""
    given = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    hidden = model(**inputs | given).last_hidden_state
    return hidden[given["attention_mask"].bool()] if "attention_mask" in given else hidden


def measure(case: dict[str, Any], device: torch.device, repeats: int) -> Rows:
    """A row for each way: the costs of its passes, and the relative L2 distance of the last hidden states."""
    shape = case["texts"], case["length"]
    exact = random_model(case["model"]).to(device, getattr(torch, case["dtype"]))
    models = {EXACT: exact, BLOCKS: patch_attention(copy.deepcopy(exact), "exact")}
    call = partial(run, inputs=inputs_for(exact, *shape))
    outputs = {name: forward(model, call).double() for name, model in models.items()}
    error = (outputs[BLOCKS] - outputs[EXACT]).norm() / outputs[EXACT].norm()
    rows = time_models(models, call, device, repeats, trains=(*shape, True) in MODELS[case["model"]].cases)
    rows[BLOCKS]["error"] = error.item()
    layers = exact.config.num_hidden_layers
    return [case | {"layers": layers, "method": name} | row for name, row in rows.items()]


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    dtypes: Dtypes = None,
    repeats: Repeats = 3,
    output: Annotated[Path | None, typer.Option(help="Folder of the results. Default: scripts/results.")] = None,
) -> None:
    """Measure each model on its inputs; keep the rows of every table as JSON."""
    names = models.split(",")
    check_names("models", names, MODELS)
    for file in dict.fromkeys(MODELS[name].file for name in names):
        cases = [
            {"model": name, "texts": texts, "length": length}
            for name in names
            if MODELS[name].file == file
            for texts, length, _ in MODELS[name].cases
        ]
        path = None if output is None else output / f"benchmark_{file}.json"
        measure_dtypes(file, {}, cases, dtypes, path, partial(measure, repeats=repeats))


if __name__ == "__main__":
    run_with_help(main, __doc__)
