"""How much faster are Longformer, the encoders of LED, LongT5, Pegasus-X, the privacy filter, Gemma 2 in blocks?

Beside transformers' own code, and how far off it. In the sizes of the published models, with fewer layers, as all are
alike; random weights and texts, whose first token sees all others in Longformer and LED, as classification has it.
Both ways are timed in one run, interleaved, forward and a step of training, and their memory is taken. LongT5
(transient-global) is not trained: its scores have biases that learn, for which torch has no faster way. Nor is the
filter, whose experts take nearly all of a step.

    python -m scripts.benchmark.longformer     # writes scripts/results/benchmark_longformer.json; minutes on two cores

What the output file holds is not measured again.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import (
    Gemma2Config,
    Gemma2Model,
    LEDConfig,
    LEDModel,
    LongformerConfig,
    LongformerModel,
    LongT5Config,
    LongT5EncoderModel,
    OpenAIPrivacyFilterConfig,
    OpenAIPrivacyFilterModel,
    PegasusXConfig,
    PegasusXModel,
    PreTrainedModel,
)

from ..shared.command_line import run_with_help
from ._exact import Dtypes, Repeats, beside_own_code, check_models, measure_all
from .models import TOKENS

PRIVACY_FILTER, GEMMA = "privacy-filter", "Gemma-2-2b"
# LongT5's first layer stays transformers' own.
LAYERS = {"Longformer-base": 3, "LED-base": 3, "LongT5-base": 6, "Pegasus-X-base": 3, PRIVACY_FILTER: 2, GEMMA: 2}
LENGTHS = {
    "Longformer-base": (512, 1024, 4096),
    "LED-base": (4096, 16384),
    "LongT5-base": (4096, 16384),
    "Pegasus-X-base": (4096, 16384),
    PRIVACY_FILTER: (640, 1024, 4096),
    GEMMA: (1024, 4096),
}
FORWARD_ONLY = ("LongT5-base", PRIVACY_FILTER)


def encoder(name: str, length: int, **sizes: Any) -> PreTrainedModel:
    """One of them, exact, with random weights; decoders are one layer that nothing calls."""
    torch.manual_seed(0)
    if name == "LongT5-base":
        kind = {"encoder_attention_type": "transient-global", "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
        widths = {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 2048, "num_layers": LAYERS[name]}
        return LongT5EncoderModel(LongT5Config(**kind | widths | {"vocab_size": TOKENS} | sizes))
    if name == "Pegasus-X-base":
        widths = {
            "d_model": 768,
            "encoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        }
        kind = {"encoder_layers": LAYERS[name], "decoder_layers": 1, "dropout": 0.0, "vocab_size": TOKENS}
        return PegasusXModel(PegasusXConfig(**kind | widths | sizes)).get_encoder()
    if name == PRIVACY_FILTER:
        own = {"num_hidden_layers": LAYERS[name], "pad_token_id": 1, "eos_token_id": 2, "vocab_size": TOKENS}
        return OpenAIPrivacyFilterModel(OpenAIPrivacyFilterConfig(**own | sizes))
    if name == GEMMA:  # one layer in two sees windows, of 4,096
        own = {"num_hidden_layers": LAYERS[name], "vocab_size": TOKENS}
        return Gemma2Model._from_config(Gemma2Config(**own | sizes), attn_implementation="eager")
    same = {"vocab_size": TOKENS, "attention_probs_dropout_prob": 0.0}
    if name == "Longformer-base":
        own = {"num_hidden_layers": LAYERS[name], "max_position_embeddings": length + 2, "pad_token_id": 1}
        return LongformerModel(LongformerConfig(**own | {"hidden_dropout_prob": 0.0} | same | sizes))
    own = {"encoder_layers": LAYERS[name], "decoder_layers": 1, "max_encoder_position_embeddings": length}
    widths = {"d_model": 768, "encoder_ffn_dim": 3072, "encoder_attention_heads": 12, "attention_window": 1024}
    return LEDModel(LEDConfig(**own | widths | {"dropout": 0.0} | same | sizes))


def run(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The last hidden state."""
    if isinstance(model, LongT5EncoderModel):
        return model(tokens, attention_mask=torch.ones_like(tokens))[0]
    if model.config.model_type == "gemma2":
        return model(tokens, use_cache=False)[0]
    if model.config.model_type in ("pegasus_x", "openai_privacy_filter"):
        return model(input_ids=tokens)[0]
    first = torch.zeros_like(tokens)
    first[:, 0] = 1
    called = model.get_encoder() if model.config.is_encoder_decoder else model
    return called(tokens, attention_mask=torch.ones_like(tokens), global_attention_mask=first)[0]


def measure(case: dict[str, Any], device: torch.device, repeats: int, **sizes: Any) -> list[dict[str, Any]]:
    """The rows of one model and length."""
    tokens = torch.randint(3, TOKENS, (1, case["length"]), generator=torch.Generator().manual_seed(0)).to(device)
    model, trains = encoder(case["model"], case["length"], **sizes), case["model"] not in FORWARD_ONLY
    return beside_own_code(case, model, partial(run, tokens=tokens), device, repeats, trains=trains)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(LENGTHS),
    dtypes: Dtypes = None,
    repeats: Repeats = 3,
    output: Path | None = None,
) -> None:
    """Measure each of them at its lengths; keep it as JSON."""
    check_models(models, LENGTHS)
    cases = [
        {"model": name, "layers": LAYERS[name], "length": length}
        for name in models.split(",")
        for length in LENGTHS[name]
    ]
    measure_all("longformer", {}, cases, dtypes, output, partial(measure, repeats=repeats))


if __name__ == "__main__":
    run_with_help(main, __doc__)
