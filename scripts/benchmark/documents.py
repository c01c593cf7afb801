"""How long does one long document take a text encoder on a CPU, and how much memory, exact and patched?

Encoders that embed and rank documents of 8k and 32k tokens, in their real shapes. The weights are random and the
vocabulary small: time and memory don't depend on them, errors would, and are measured elsewhere (`hf_effattn.report`).
Which settings which head needs random weights cannot tell: heads have those that MiniLM's need on this machine for a
mean error of its layers of 0.1 at that length, found on books, measured on others
(`scripts/benchmark/layer_budgets.py`). The exact model also says what share of its time is attention, the most that a
patch can save, and how much of that is in
layers with a sliding window, which a patch runs in blocks, without error: what that alone gives has a row of its own.
All calls of a document are interleaved in one run.

    python -m scripts.benchmark.documents        # writes scripts/results/benchmark_documents.json; hours on two cores
    python -m scripts.benchmark.documents --shapes gte-base --lengths 4096 --dtypes float32    # minutes

What the output file holds is not measured again.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import track
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_effattn import patch_attention, unpatch_attention
from hf_effattn.measuring.bench import exact_output
from hf_effattn.measuring.candidate_errors import default_candidates
from hf_effattn.measuring.cost import interleaved_rounds, median, median_ratio, peak_memory_added, timed
from hf_effattn.patching.methods.per_head import described
from hf_effattn.patching.model_types.stacks import find_stacks

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_table
from ._inputs import held_out_inputs
from ._timing import forward
from .attention import EXACT
from .layer_budgets import by_layer, errors_of_books, within
from .models import SHAPES as BERT_SHAPES
from .models import TOKENS, last_hidden_state, random_tokens
from .other_methods import errors_of_layers

# Model types, and what their configurations say beyond the defaults of transformers, which are these models'.
SHAPES: dict[str, dict[str, Any]] = {
    "bge-m3": {"model_type": "xlm-roberta", **BERT_SHAPES["large"]},
    "gte-base": {"model_type": "gte"},
    "ModernBERT-base": {"model_type": "modernbert"},
    "EmbeddingGemma": {
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 1152,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
    },
    "EmbeddingGemma 2": {"model_type": "embedding_gemma2_text"},
}
CALIBRATED = "bi-clustered, calibrated"
BUDGET = 0.1
METHODS: dict[str, dict[str, Any]] = {
    "i-clustered clusters=100 topk=32": {"method": "i-clustered", "clusters": 100, "topk": 32},
    CALIBRATED: {"method": "per-head", "max_error": BUDGET},  # the heads: `calibrated_heads`
}
WINDOWS_ALONE = "exact, windows in blocks"
HEADS = "heads"  # what a row is about: the settings of heads
TIMED = "timed-exact"
FULL, WINDOWED = "full", "windowed"
WARM_UP_LENGTH = 256
_spent = {FULL: 0.0, WINDOWED: 0.0}


def random_model(shape: str, length: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """An encoder of a shape with random weights that takes `length` tokens and counts the seconds of its attention."""
    torch.manual_seed(0)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    config = AutoConfig.for_model(**SHAPES[shape], **special, vocab_size=TOKENS)
    config.max_position_embeddings = max(config.max_position_embeddings, length + 2)
    AttentionInterface.register(TIMED, _timed_attention)
    AttentionMaskInterface.register(TIMED, sdpa_mask)
    model = AutoModel.from_config(config, attn_implementation=TIMED)
    return model.to(device, dtype).eval()


def _timed_attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    (output, _), seconds = timed(partial(sdpa_attention_forward, module, query, *args, **kwargs), query.device)
    _spent[FULL if getattr(module, "sliding_window", None) is None else WINDOWED] += seconds
    return output, None


def calibrated_heads(length: int) -> dict[str, Any]:
    """The settings of MiniLM's heads for `BUDGET`, and their error on held-out books."""
    table = within(BUDGET, *errors_of_books(length, training=False))
    layers = held_out_inputs(length)
    errors = errors_of_layers(
        by_layer(table.pop("settings"), layers), layers, [exact_output(inputs) for inputs in layers]
    )
    return table | {"error": sum(errors) / len(errors), "layer_errors": errors}


def heads_like(table: list[list[int]], layers: int, heads: int) -> list[list[int]]:
    """A table of heads for another number of layers and heads: stretched, neighbours alike.

    Fewer have the dearest settings of those that they stand for, as query heads have that share keys.
    """

    def stand_for(count: int, index: int, others: int) -> range:
        first = index * count // others
        return range(first, max(first + 1, (index + 1) * count // others))

    return [
        [
            max(
                table[i][j]
                for i in stand_for(len(table), layer, layers)
                for j in stand_for(len(table[0]), head, heads)
            )
            for head in range(heads)
        ]
        for layer in range(layers)
    ]


def switches(model: PreTrainedModel, table: list[list[int]]) -> dict[str, Callable[[], object]]:
    """What makes the model exact, and what patches it with each method, by the name of the row.

    `table`: which settings the heads of another model have.
    """
    calls: dict[str, Callable[[], object]] = {EXACT: partial(unpatch_attention, model)}
    stack = find_stacks(model)[0]
    if stack.exact.windows:
        calls[WINDOWS_ALONE] = partial(patch_attention, model, "exact")
    for name, settings in METHODS.items():
        if name == CALIBRATED:
            sizes = described(stack)
            heads = heads_like(table, sizes["layers"], sizes["key_heads"])
            candidates = default_candidates(causal=False, error_of="layer")
            settings = {"method": "per-head", "candidates": candidates, "heads": heads}
        calls[name] = partial(patch_attention, model, **settings, min_length=0)
    return calls


def read(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """One pass over a document."""
    return forward(model, partial(last_hidden_state, tokens=tokens))


def measure_memory(
    model: PreTrainedModel, table: list[list[int]], tokens: torch.Tensor, device: torch.device
) -> dict[str, dict[str, Any]]:
    """What the exact model and every method hold at most, weights and tokens aside."""
    peaks = {}
    for name, switch in switches(model, table).items():
        switch()
        read(model, tokens[:, :WARM_UP_LENGTH])
        peaks[name] = {"peak_bytes": peak_memory_added(partial(read, model, tokens), device)[1]}
    return peaks


def measure_times(
    model: PreTrainedModel, table: list[list[int]], tokens: torch.Tensor, device: torch.device, repeats: int
) -> dict[str, dict[str, Any]]:
    """Seconds of the exact model and of every method, and which share of the exact model's is attention."""
    prepare = switches(model, table)
    for name, switch in prepare.items():
        switch()
        # The first pass at a length faults its memory in. The exact model, which takes minutes, needs no more of it.
        read(model, tokens[:, :WARM_UP_LENGTH] if name == EXACT else tokens)
    _spent.update(dict.fromkeys(_spent, 0.0))
    calls = dict.fromkeys(prepare, partial(read, model, tokens))
    seconds = interleaved_rounds(calls, device, repeats, before=prepare)
    rows: dict[str, dict[str, Any]] = {
        name: {"seconds": median(times), "speedup": median_ratio(seconds[EXACT], times), "rounds": len(times)}
        for name, times in seconds.items()
    }
    whole = sum(seconds[EXACT])
    rows[EXACT]["attention_share"] = sum(_spent.values()) / whole
    rows[EXACT]["windowed_share"] = _spent[WINDOWED] / whole
    return rows


def main(
    shapes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SHAPES),
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens.")] = "8192,32768",
    dtypes: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16, float16.")] = "float32,bfloat16",
    what: Annotated[str, typer.Option(help="Comma-separated: seconds, memory.")] = "seconds,memory",
    repeats: Annotated[int, typer.Option(help="Rounds of timing; short calls get more.")] = 3,
    output: Path = RESULTS / "benchmark_documents.json",
) -> None:
    """Measure one document of every shape, length and dtype, print the table, and keep it as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = KeptRuns(
        output, {"methods": METHODS, "candidates": default_candidates(causal=False, error_of="layer")}, device
    )
    for length in sorted({int(part) for part in lengths.split(",")}):
        if not kept.matching({"what": HEADS, "length": length}):
            kept.add({"what": HEADS, "length": length, "method": CALIBRATED} | calibrated_heads(length))
    cases = [
        {"what": kind, "dtype": dtype, "length": int(length), "shape": shape}
        for kind, length, shape, dtype in product(*(names.split(",") for names in (what, lengths, shapes, dtypes)))
    ]
    for case in track(kept.missing(cases), description="documents"):
        model = random_model(case["shape"], case["length"], getattr(torch, case["dtype"]), device)
        tokens = random_tokens(case["length"], device)
        table = kept.matching({"what": HEADS, "length": case["length"]})[0]["heads"]
        if case["what"] == "memory":
            measured = measure_memory(model, table, tokens, device)
        else:
            measured = measure_times(model, table, tokens, device, repeats)
        kept.add(*(case | {"method": name} | row for name, row in measured.items()))
    rows = pd.DataFrame([row for row in kept.rows if row["what"] != HEADS])
    print_table(rows.drop(columns=list(kept.machine)), output)


if __name__ == "__main__":
    run_with_help(main, __doc__)
