"""What do int8 linear layers add to a patch on a CPU, which takes the attention's time and leaves theirs?

Seconds of a whole encoder of GTE-base's shape with random weights, one text, in float32, in bfloat16 and with int8
linear layers (`quantize_dynamic`: all, or all but those that end a feed-forward block, which move vectors the most),
each exact and patched, all interleaved in one run. And how far each moves the vectors of the pretrained BERT of the
demo (its positions repeated beyond 512 tokens) on pieces of held-out books: the cosine with the exact float32 model's.

    python -m scripts.benchmark.linear_layers       # writes scripts/results/linear_layers.json; an hour on two cores

What the output file holds is not measured again. Run nothing else on the machine meanwhile.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from hf_effattn import extend_positions, patch_attention, unpatch_attention
from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio
from hf_effattn.samples.model import load_model
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._inputs import held_out_tokens
from ._timing import CPU, Lengths, Rows, keep_missing, numbers
from .attention import EXACT
from .documents import random_model, read
from .embeddings import embed
from .models import random_tokens

METHODS = ("i-clustered clusters=100 topk=32", "bi-clustered clusters=64 topk=64 key_clusters=32")
FORMS = ("float32", "bfloat16", "int8", "int8-but-last")
SHAPE = "gte-base"
MOST_TOKENS = 32_768  # of the held-out books, per length
LONGEST_WARM_UP = 2048  # tokens


def with_int8_layers(model: PreTrainedModel, *, but_last: bool) -> PreTrainedModel:
    """A copy whose linear layers multiply int8: weights with a scale per row, activations with one per call.

    `but_last`: without those that end a feed-forward block, the only ones with more inputs than outputs.
    """
    layers = {
        name: per_channel_dynamic_qconfig
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not (but_last and layer.in_features > layer.out_features)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move this to torchao
        return quantize_dynamic(model, layers, dtype=torch.qint8)


def in_form(model: PreTrainedModel, form: str) -> PreTrainedModel:
    """A copy of a float32 model in one of `FORMS`."""
    if form.startswith("int8"):
        return with_int8_layers(model, but_last=form != "int8")
    return copy.deepcopy(model).to(getattr(torch, form))


def switches(model: PreTrainedModel) -> dict[str, Callable[[], object]]:
    """What makes the model exact, and what patches it, by method."""
    calls: dict[str, Callable[[], object]] = {EXACT: partial(unpatch_attention, model)}
    for text in METHODS:
        calls[text] = partial(patch_attention, model, **method_of(text), min_length=0)
    return calls


def measure_seconds(case: dict[str, Any], forms: Sequence[str], repeats: int) -> Rows:
    """A row per form and method."""
    model = random_model(SHAPE, case["length"], torch.float32, CPU)
    tokens = random_tokens(case["length"], CPU)
    calls: dict[str, Callable[[], object]] = {}
    before: dict[str, Callable[[], object]] = {}
    for form in forms:
        formed = in_form(model, form)
        for method, switch in switches(formed).items():
            switch()
            read(formed, tokens[:, :LONGEST_WARM_UP])
            calls[f"{form} {method}"], before[f"{form} {method}"] = partial(read, formed, tokens), switch
    seconds = interleaved_rounds(calls, CPU, repeats, before=before)
    baseline = seconds[f"float32 {EXACT}"]
    rows = []
    for name, times in seconds.items():
        form, _, method = name.partition(" ")
        found = {"seconds": median(times), "speedup": median_ratio(baseline, times), "rounds": len(times)}
        rows.append(case | {"form": form, "method": method} | found)
    return rows


def measure_vectors(case: dict[str, Any]) -> Rows:
    """A row per form and method: cosines with the exact float32 model's vectors."""
    model, tokenizer, _ = load_model(None)
    length = case["length"]
    books = torch.cat([book[1:-1] for book in held_out_tokens(tokenizer)])
    pieces = books[: len(books) // (length - 2) * (length - 2)].view(-1, length - 2)[: max(1, MOST_TOKENS // length)]
    first, last = (torch.full((len(pieces), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    tokens = torch.cat([first, pieces, last], dim=1)
    if length > model.config.max_position_embeddings:
        extend_positions(model, length)
    rows: Rows = []
    exact = None
    for form in FORMS:
        formed = in_form(model, form)
        for method, switch in switches(formed).items():
            switch()
            # One text at a time: int8 activations have one scale for all texts of a call.
            vectors = normalize(torch.cat([embed(formed, piece[None]).float() for piece in tokens]), dim=-1)
            exact = vectors if exact is None else exact
            cosines = (vectors * exact).sum(dim=1)
            found = {"cosine_mean": cosines.mean().item(), "cosine_min": cosines.min().item()}
            rows.append(case | {"form": form, "method": method, "texts": len(tokens)} | found)
    return rows


def main(
    lengths: Lengths = "2048,8192,32768",
    vector_lengths: Lengths = "2048,8192",
    forms: Annotated[str, typer.Option(help="Comma-separated, float32 first: what is timed.")] = ",".join(FORMS),
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 2,
    output: Path = RESULTS / "linear_layers.json",
) -> None:
    """Measure every length, print the table, and keep it as JSON."""
    kept = KeptRuns(output, {"shape": SHAPE, "methods": METHODS})
    vectors = [{"what": "vectors", "length": length} for length in numbers(vector_lengths)]
    keep_missing(kept, vectors, measure_vectors, "vectors")
    times = [{"what": "seconds", "length": length} for length in numbers(lengths)]
    keep_missing(kept, times, partial(measure_seconds, forms=forms.split(","), repeats=repeats), "seconds")
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
