"""How much faster are T5, MPNet, DeBERTa, Parakeet, Wav2Vec2-BERT without matrices of distances, and how far off?

Beside transformers' own code. In the sizes of the published models, with fewer layers, as all are alike, and without
the convolutions before Parakeet's; random weights and texts, of which several are padded, the shortest to half. Both
ways are timed in one run, interleaved, forward and a step of training with the published dropout, and their memory is
taken.

    python -m scripts.benchmark.relative_bias     # writes scripts/results/benchmark_relative_bias.json

It takes minutes on two cores. What the output file holds is not measured again.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
    ParakeetEncoder,
    ParakeetEncoderConfig,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
)

from ..shared.command_line import run_with_help
from ._exact import Dtypes, Repeats, beside_own_code, check_models, measure_all
from .models import TOKENS

LAYERS = 3
# Texts and their length, and whether a step of training is timed, which transformers has no memory for at the longest.
CASES: dict[str, list[tuple[int, int, bool]]] = {
    "T5-base": [(1, 512, True), (8, 512, True), (1, 2048, True), (1, 4096, True), (1, 8192, False)],
    "MPNet-base": [(1, 512, True), (8, 512, True)],
    "DeBERTa-v3-base": [(1, 512, True), (8, 512, True), (1, 2048, True), (1, 4096, False)],
    # Recordings of half a minute, two and six minutes.
    "Parakeet-0.6b": [(1, 375, True), (8, 375, True), (1, 1500, True), (1, 4500, False)],
    # Of ten seconds, of half a minute, of one and a half.
    "w2v-bert-2.0": [(1, 500, True), (8, 500, True), (1, 1500, True), (1, 4500, False)],
}


class Subsampled(nn.Module):
    """Frames as they come out of the convolutions that Parakeet begins with."""

    def forward(self, frames: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
        """The frames, `(B, N, E)`."""
        return frames


def encoder(name: str, length: int, **sizes: Any) -> PreTrainedModel:
    """One of them, exact, with random weights."""
    torch.manual_seed(0)
    own: dict[str, Any] = {"vocab_size": TOKENS}
    if name == "T5-base":
        own |= {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": LAYERS}
        return T5EncoderModel(T5Config(**own | sizes))
    own |= {"num_hidden_layers": LAYERS}
    if name == "Parakeet-0.6b":
        own = {"num_hidden_layers": LAYERS, "subsampling_factor": 1, "layerdrop": 0.0}
        model = ParakeetEncoder(ParakeetEncoderConfig(**own | sizes))
        model.subsampling = Subsampled()
        return model
    if name == "w2v-bert-2.0":
        own = {"num_hidden_layers": LAYERS, "apply_spec_augment": False, "layerdrop": 0.0}
        return Wav2Vec2BertModel(Wav2Vec2BertConfig(**own | sizes))
    if name == "MPNet-base":
        own |= {"max_position_embeddings": length + 2}
        return MPNetModel(MPNetConfig(**own | sizes), add_pooling_layer=False)
    own |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
    own |= {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}  # by default those of XL
    own |= {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    return DebertaV2Model(DebertaV2Config(**own | sizes))


def tokens_for(model: PreTrainedModel, texts: int, length: int) -> torch.Tensor:
    """Random tokens, `(texts, length)`, or frames, `(texts, length, E)`, or what is read of them."""
    draw = torch.Generator().manual_seed(0)
    if isinstance(model, Wav2Vec2BertModel):
        return torch.randn(texts, length, model.config.feature_projection_input_dim, generator=draw)
    if isinstance(model, ParakeetEncoder):
        return torch.randn(texts, length, model.config.hidden_size, generator=draw)
    return torch.randint(3, TOKENS, (texts, length), generator=draw)


def seen_tokens(texts: int, length: int) -> torch.Tensor:
    """Padding, `(texts, length)`: from whole texts to half."""
    lengths = torch.linspace(length, length // 2 if texts > 1 else length, texts).long()
    return (torch.arange(length) < lengths[:, None]).long()


def run(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The last hidden state of the tokens that are no padding; frames in the precision of the model."""
    tokens = tokens.to(model.dtype) if tokens.is_floating_point() else tokens
    return model(tokens, attention_mask=mask).last_hidden_state[mask.bool()]


def measure(
    case: dict[str, Any], device: torch.device, repeats: int, *, trains: bool, **sizes: Any
) -> list[dict[str, Any]]:
    """The rows of one model and batch."""
    shape = case["texts"], case["length"]
    model = encoder(case["model"], case["length"], **sizes)
    once = partial(run, tokens=tokens_for(model, *shape).to(device), mask=seen_tokens(*shape).to(device))
    return beside_own_code(case, model, once, device, repeats, trains=trains)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CASES),
    dtypes: Dtypes = None,
    repeats: Repeats = 3,
    output: Path | None = None,
) -> None:
    """Measure each of them on its batches; keep it as JSON."""
    check_models(models, CASES)
    trained = {(name, texts, length): trains for name in models.split(",") for texts, length, trains in CASES[name]}
    cases = [{"model": name, "texts": texts, "length": length} for name, texts, length in trained]

    def rows(case: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        return measure(case, device, repeats, trains=trained[case["model"], case["texts"], case["length"]])

    measure_all("relative_bias", {"layers": LAYERS}, cases, dtypes, output, rows)


if __name__ == "__main__":
    run_with_help(main, __doc__)
