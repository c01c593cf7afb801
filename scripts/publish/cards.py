"""The model cards in `model_cards/`, from committed JSON alone; `scripts/publish/readme.py` writes them.

Each folder there holds the configuration of its model, the report or the results that its numbers come from, and the
weights where they are small.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from transformers import AutoConfig

from hf_effattn import model_card
from hf_effattn.hub import evaluations_of
from hf_effattn.models.clusterformer.outputs import CLUSTERING_FIELDS
from hf_effattn.reporting import Report
from hf_effattn.reporting.table import markdown

from ..shared.markdown import machine
from . import cst_tables as paper_tables

CARDS = Path(__file__).resolve().parents[2] / "model_cards"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
OF_WIKITEXT: dict[str, Any] = {"license": "cc-by-sa-3.0", "datasets": ["Salesforce/wikitext"]}
ALLOCATOR = "export MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000"
ENGLISH = "English of its training data, with the prejudices in it. Not for decisions about people."


def in_bash(*lines: str) -> str:
    """Commands as Markdown."""
    return "\n".join(["```bash", *lines, "```"])


def card_with_weights(folder: Path, **options: Any) -> ModelCard:
    """The card of a model whose weights lie in its folder; `options` are those of `model_card`."""
    config = AutoConfig.from_pretrained(folder)
    return model_card(config, name=folder.name, repo_id=f"model_cards/{folder.name}", language="en", **options)


def rows_of(task: str, model: str) -> list[dict[str, Any]]:
    """What `scripts/reproduce/cst.py` kept of a trained model, a row per seed."""
    result = paper_tables.kept("cst_training") or {"rows": []}
    return [row for row in result["rows"] if (row["task"], row["model"]) == (task, model) and "arguments" in row]


def minilm_i_clustered() -> ModelCard:
    """The demo's BERT, patched."""
    folder = CARDS / "minilm-i-clustered"
    config = AutoConfig.from_pretrained(folder)
    return model_card(
        config,
        name=folder.name,
        base_model=MINILM,
        license="apache-2.0",
        language="en",
        report=Report.load(folder),
        description=(
            "Made for looking at what patching does to a small sentence encoder. Its own positions end at "
            f"{config.max_position_embeddings}; beyond, they are repeated (`hf_effattn.extend_positions`), which the "
            "model was not trained for: the errors there are against the exact model with the same positions."
        ),
        sections={
            "Error by layer and head": "![Error of the attention output by layer and head](attention_error_8192.png)",
            "How it was made": in_bash(
                f'effattn convert {MINILM} {folder.name} --method "i-clustered clusters=100 topk=32"',
                'effattn report --lengths 512,2048,8192 --method "i-clustered clusters=100 topk=32" \\',
                '    --method "i-clustered clusters=100 topk=64" --method "bi-clustered clusters=100 topk=64" \\',
                f"    --output model_cards/{folder.name}",
                "python -m scripts.publish.readme",
            ),
        },
        limits=["Sentences in English. Not for decisions about people."],
    )


def minilm_cst() -> ModelCard:
    """The demo's BERT, converted to slices and fine-tuned on SST-2."""
    folder = CARDS / "minilm-cst-sst2"
    runs = rows_of("SST-2", "BERT, CST L=16 α=3")
    evaluations = [
        EvalResult(
            task_type="text-classification",
            dataset_type="stanfordnlp/sst2",
            dataset_name="SST-2",
            dataset_split="validation",
            metric_type="accuracy",
            metric_name=f"accuracy, mean of {len(runs)} seeds" if len(runs) > 1 else None,
            metric_value=round(statistics.fmean(run["eval_accuracy"] for run in runs), 4),
        )
        for _ in runs[:1]
    ]
    return model_card(
        AutoConfig.from_pretrained(folder),
        name=folder.name,
        base_model=MINILM,
        license="apache-2.0",
        language="en",
        datasets=["stanfordnlp/sst2"],
        evaluations=evaluations,
        description="The weights are too large for the repository; the commands below make them.",
        sections={
            "Beside the exact model, fine-tuned alike": paper_tables.converted()
            + "\n\nSentences of SST-2 are short: with `extension_ratio=3` and slices of 16 most tokens see nearly the "
            "whole sentence. So the table says whether a conversion can be fine-tuned, and little about long texts.",
            "Before any fine-tuning": "Cosine of the sentence embeddings with those of the exact model.\n\n"
            + paper_tables.before_fine_tuning(),
            "How it was made": in_bash(ALLOCATOR, "python -m scripts.reproduce.cst SST-2 --seeds 0,1")
            + "\n\nwhich runs `scripts/train/classification.py` with `--method cst`; with data from the Hub:\n\n"
            + in_bash(
                f"python scripts/train/glue.py --task_name sst2 --model_name_or_path {MINILM} \\",
                f'    --method "cst slice_length=16 extension_ratio=3" --output_dir {folder.name} \\',
                "    --do_train --do_eval --bf16 --num_train_epochs 1 --per_device_train_batch_size 32 \\",
                "    --learning_rate 5e-5 --warmup_steps 100",
            ),
        },
        limits=["English film reviews of the early 2000s, with two classes; not for decisions about people."],
    )


def cst_wikitext() -> ModelCard:
    """A Composite Slice Transformer that models language, with its weights."""
    folder = CARDS / "cst-wikitext2"
    run = rows_of("WikiText-2, 256 tokens", "CST L=32 α=3")[0]
    scores = {f"eval_{name}": round(run[name], 2) for name in ("perplexity", "word_perplexity")}
    return card_with_weights(
        folder,
        **OF_WIKITEXT,
        evaluations=evaluations_of(
            scores,
            task="text-generation",
            dataset="Salesforce/wikitext",
            dataset_name="WikiText-2",
            dataset_config="wikitext-2-v1",
        ),
        description=(
            "Small, to test on: its weights, in bfloat16, are those of a trained model. Perplexities are per token of "
            "its own byte-level BPE and per word."
        ),
        sections={
            "Beside the Transformer of the same size": paper_tables.language_models(),
            "How it was made": in_bash(ALLOCATOR, 'python -m scripts.reproduce.cst "WikiText-2, 256 tokens"')
            + "\n\nand, once trained:\n\n```python\n"
            + 'run = "runs/…"  # the folder of that model\n'
            + 'model = AutoModelForCausalLM.from_pretrained(run, dtype="bfloat16")\n'
            + f'model.save_pretrained("model_cards/{folder.name}")\n```',
        },
        limits=["It writes sentences without meaning; nothing it writes is true.", ENGLISH],
    )


def clusterformer_newsgroups() -> ModelCard:
    """A ClusterFormer that classifies long texts, with its weights."""
    folder = CARDS / "clusterformer-20news"
    results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    tested = {name: round(results[name], 4) for name in ("test_accuracy", "test_loss")}
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    names = ("step", "loss", *CLUSTERING_FIELDS)
    logged = [
        [f"{row[name]:,}" if name == "step" else f"{row[name]:.3f}" for name in names]
        for row in log
        if "task_loss" in row
    ]
    return card_with_weights(
        folder,
        evaluations=evaluations_of(
            tested, task="text-classification", dataset="20news-bydate", dataset_name="20 Newsgroups, by date"
        ),
        description=(
            "Small, to test on: messages of twenty newsgroups of 1993 with their headers, cut at the longest input. "
            "Its weights are in bfloat16, its tokenizer is a byte-level BPE of the training messages. It was trained "
            "with the defaults: the gate and attention to the centroids, without L1 and L2."
        ),
        sections={
            "What the clustering did": "Means since the line before: the losses of the task and of the clustering, "
            "the share of a text's words in its largest cluster, of clusters without a word, and the mean cosine of "
            "two words.\n\n" + markdown([name.replace("_", " ") for name in names], logged),
            "How it was made": in_bash(
                ALLOCATOR,
                "SIZES=hidden_size=300,num_hidden_layers=2,num_attention_heads=4,intermediate_size=600,clusters=20",
                "SIZES=$SIZES,attention_probs_dropout_prob=0.0,max_position_embeddings=512",
                "python scripts/train/classification.py --train_files 20newsgroups/train.jsonl.gz \\",
                "    --test_files 20newsgroups/test.jsonl.gz --validation_share 0 --model_type clusterformer \\",
                "    --config_overrides $SIZES --vocab_size 8000 --max_length 512 --num_train_epochs 3 --bf16 \\",
                "    --learning_rate 5e-4 --warmup_steps 0.1 --weight_decay 0.01 --use_cpu --do_train --do_predict \\",
                "    --per_device_train_batch_size 32 --train_sampling_strategy group_by_length \\",
                "    --save_dtype bfloat16 --output_dir runs/20news",
            ),
        },
        limits=[ENGLISH],
    )


def greedy_texts() -> str:
    """How many greedy continuations stay those of exact attention."""
    result = paper_tables.kept("causal_generation") or {}
    rows = [
        [row["run"], f"{row['equal_texts']} of {row['prompts']}", f"{row['scored_share']:.0%}"]
        for row in result["rows"]
    ]
    note = (
        f"{result['new_tokens']} new tokens after prompts of {result['prompt_length']} tokens of held-out books "
        "(`scripts/benchmark/causal_generation.py`); scores: of those that exact attention computes in the prompt. "
    )
    return markdown(["", "the same text as exact attention", "scores"], rows) + machine(result["environment"], note)


def gpt2_books() -> ModelCard:
    """The small GPT-2 that causal attention is tested on, with its weights."""
    folder = CARDS / "gpt2-books"
    metrics = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    counted = [
        ["frequencies of tokens", f"{metrics['unigram_loss']:.3f}"],
        ["frequencies of pairs", f"{metrics['bigram_loss']:.3f}"],
        ["this model", f"{metrics['eval_loss']:.3f}"],
    ]
    tokens = f"{metrics['validation_tokens']:,} tokens of held-out books, {metrics['train_tokens']:,} to train on"
    return card_with_weights(
        folder,
        **OF_WIKITEXT,
        description=(
            "A small GPT-2 to test causal attention on, trained on public-domain novels of Project Gutenberg and on "
            "WikiText-2. Its purpose is that its queries, keys and values are those of a trained model, on inputs "
            "longer than BERT's. It gains nothing from context beyond a few hundred tokens: a test that needs long "
            "memory must take another model.\n\n"
            "What clustered attention does to a real language model is measured on another one, by "
            "`scripts/benchmark/language_model.py`."
        ),
        sections={
            "Loss": markdown(["", "loss, nats per token"], counted)
            + f"\n\n<sub>{tokens}</sub>\n\nTwo books were held out: *The Adventures of Sherlock Holmes* and *A Tale "
            "of Two Cities*.",
            "Greedy text with its attention replaced": greedy_texts(),
            "How it was made": "On two cores of a CPU, with the books and WikiText-2 as text files (`$BOOKS`: all but "
            "the two held out); then once more, from where the first run had ended:\n\n"
            + in_bash(
                f"{ALLOCATOR} OMP_NUM_THREADS=2",
                'COMMON="--train_files $BOOKS wiki.train.tokens.gz --validation_files pg1661-*.txt.gz pg98-*.txt.gz',
                "    --block_length 2048 --do_train --do_eval --bf16 --use_cpu --per_device_train_batch_size 2",
                "    --per_device_eval_batch_size 2 --lr_scheduler_type cosine --weight_decay 0.1 --adam_beta2 0.98",
                '    --logging_steps 20 --save_steps 100 --save_total_limit 2 --eval_strategy no --report_to none"',
                "python scripts/train/clm.py $COMMON --output_dir runs/first --max_steps 3000 --learning_rate 2e-3 \\",
                "    --warmup_steps 150 --vocab_size 5000 --model_type gpt2 --seed 0 \\",
                "    --config_overrides n_layer=4,n_embd=256,n_head=4,attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0",
                "python scripts/train/clm.py $COMMON --output_dir runs/gpt2 --max_steps 1500 \\",
                "    --learning_rate 1.2e-3 --warmup_steps 50 --model_name_or_path runs/first --seed 1 \\",
                "    --save_dtype bfloat16 --ngram_losses",
            )
            + "\n\n`trainer_state_first.json` and `trainer_state.json` are the logs, `all_results.json` what was "
            "printed at the end. The weights are bfloat16.",
        },
        limits=[
            "English of the nineteenth century with its prejudices; nothing it writes is true. Not for use.",
            "WikiText-2 is under CC BY-SA 3.0, so the weights are too.",
        ],
    )


MADE: dict[str, Callable[[], ModelCard]] = {
    "clusterformer-20news": clusterformer_newsgroups,
    "cst-wikitext2": cst_wikitext,
    "gpt2-books": gpt2_books,
    "minilm-cst-sst2": minilm_cst,
    "minilm-i-clustered": minilm_i_clustered,
}


def text_of(name: str) -> str:
    """The card of the folder `name` of `model_cards/`."""
    return str(MADE[name]())
