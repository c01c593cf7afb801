r"""Train or evaluate a model that finds the answer to a question in a text (SQuAD), with transformers' `Trainer`.

Data comes from the Hub by name, or from local files: SQuAD's own JSON, or JSON lines with `id`, `question`, `context`
and `answers` (gzip too). The model is a checkpoint, plain or with its attention replaced, or one from scratch; its
tokenizer must be a fast one.

    python scripts/train/qa.py --dataset_name rajpurkar/squad --model_name_or_path bert-base-uncased \
        --method "i-clustered clusters=25 topk=32" --output_dir runs/squad --do_train --do_eval
    python scripts/train/qa.py --dataset_name rajpurkar/squad_v2 --version_2_with_negative \
        --model_name_or_path roberta-base --output_dir runs/squad2 --do_train --do_eval
    python scripts/train/qa.py --train_files train-v1.1.json.gz --validation_files dev-v1.1.json.gz --model_type cst \
        --config_overrides slice_length=16 --output_dir runs/cst --do_train --do_eval --bf16

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder. The metrics are printed and
kept in `all_results.json` there, the answers in `eval_predictions.json`, the best few to each question in
`eval_nbest_predictions.json`. A method leaves inputs below its `min_length` exact, which may be all windows: with
`min_length=0` it approximates them, too.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
)

from hf_effattn.data.checks import check_one_source
from hf_effattn.data.hub_data import load_from_hub
from hf_effattn.data.qa_features import COLUMNS, count_from_left, find_answers, make_windows, read_questions
from hf_effattn.training import (
    RepeatableTrainer,
    check_splits,
    drawn_samples,
    load_metric,
    load_tokenizer,
    make_model,
    parsed_arguments,
    run_classifier,
    training_split,
)

GIVEN_BY = {
    "train": "--train_files or a --dataset_name that has them",
    "validation": "--validation_files or a --dataset_name that has them",
}


@dataclass
class DataArguments:
    """Which questions, how they are cut into windows, and how an answer is chosen."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, in SQuAD's form."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "SQuAD JSON or JSON lines (gzip too)."})
    validation_files: list[str] = field(default_factory=list, metadata={"help": "The same, to evaluate on."})
    max_length: int = field(
        default=384, metadata={"help": "Tokens of a window, question included; no more than the tokenizer allows."}
    )
    doc_stride: int = field(default=128, metadata={"help": "Tokens that two windows of a long text have in common."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad all windows to max_length, not to the longest of a batch."}
    )
    n_best_size: int = field(default=20, metadata={"help": "Answers to each question that are kept."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of an answer at most."})
    version_2_with_negative: bool = field(
        default=False, metadata={"help": "Some questions have no answer (SQuAD v2)."}
    )
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={
            "help": "A question is refused if the empty answer scores so much more than the best other one. After an"
            " evaluation: log(p / (1 - p)) of the metric's best_f1_thresh p."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many questions, drawn by lot."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})
    sample_seed: int = field(default=0, metadata={"help": "Decides which questions those are."})


def load_questions(arguments: DataArguments) -> DatasetDict:
    """The splits `train` and `validation`, those that there are: `id`, `question`, `context` and `answers`.

    Raises:
        ValueError: no data is named, or both a data set of the Hub and files; or there are questions to evaluate that
            have no answer, which v1.1 does not know.
    """
    check_one_source(arguments, ("dataset_name", "dataset_config_name"), ("train_files", "validation_files"))
    files = {"train": arguments.train_files, "validation": arguments.validation_files}
    if arguments.dataset_name is not None:
        data = load_from_hub(arguments.dataset_name, arguments.dataset_config_name, instead="--train_files")
        data = DatasetDict({split: data[split].select_columns(list(COLUMNS)) for split in files if split in data})
    elif any(files.values()):
        rows = {split: [row for path in paths for row in read_questions(path)] for split, paths in files.items()}
        data = DatasetDict({split: Dataset.from_list(rows[split], COLUMNS) for split in files if rows[split]})
    else:
        raise ValueError("no questions: name a data set with --dataset_name, or files with --train_files")
    most = {"train": arguments.max_train_samples, "validation": arguments.max_eval_samples}
    data = drawn_samples(data, most, arguments.sample_seed)
    references = data["validation"]["answers"] if "validation" in data else []
    if not arguments.version_2_with_negative and not all(answers["text"] for answers in references):
        raise ValueError("some questions have no answer: pass --version_2_with_negative")
    return data


def answer_metrics(
    prediction: EvalPrediction, questions: Dataset, windows: Dataset, arguments: DataArguments, folder: Path | None
) -> dict[str, float]:
    """SQuAD's metric of the answers that the logits stand for, which are kept in the folder if one is given."""
    may_refuse = arguments.version_2_with_negative
    start_logits, end_logits = prediction.predictions
    sizes = {"n_best_size": arguments.n_best_size, "max_answer_length": arguments.max_answer_length}
    n_best = find_answers(questions, windows, start_logits, end_logits, **sizes, with_null=may_refuse)
    given: dict[str, str] = {}
    refusals: dict[str, float] = {}
    for name, answers in n_best.items():
        # The answers come best first, and one of them is empty if questions may be refused.
        best = next((answer for answer in answers if answer["text"]), None)
        given[name], refusals[name] = best["text"] if best else "", 0.0
        if may_refuse and best:
            empty = next(answer for answer in answers if not answer["text"])
            refusals[name] = sum(empty[logit] - best[logit] for logit in ("start_logit", "end_logit"))
    limit = arguments.null_score_diff_threshold
    answered = {name: "" if refusals[name] > limit else text for name, text in given.items()}
    if folder is not None:
        kept = {"predictions": answered, "nbest_predictions": n_best}
        for name, content in (kept | ({"null_odds": refusals} if may_refuse else {})).items():
            (folder / f"eval_{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), "utf-8")
    references = [{"id": row["id"], "answers": row["answers"]} for row in questions]
    if not may_refuse:
        predictions = [{"id": name, "prediction_text": text} for name, text in answered.items()]
        return load_metric("squad").compute(predictions=predictions, references=references)
    # The metric looks for the best threshold, so it is given the answers that were refused, too.
    chances = 0.5 + 0.5 * np.tanh(0.5 * np.array([limit, *refusals.values()]))
    predictions = [
        {"id": name, "prediction_text": text, "no_answer_probability": chance}
        for (name, text), chance in zip(given.items(), chances[1:], strict=True)
    ]
    metric = load_metric("squad_v2")
    return metric.compute(predictions=predictions, references=references, no_answer_threshold=chances[0])


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate as the arguments say; returns the metrics."""
    no_predictions = "--do_eval writes the answers to the questions it evaluates on"
    model_arguments, data_arguments, training = parsed_arguments(
        __doc__, command_line, DataArguments, instead_of_predictions=no_predictions
    )
    data = load_questions(data_arguments)
    check_splits(data, training, GIVEN_BY)

    def texts() -> Iterator[str]:
        questions = training_split(data)
        yield from dict.fromkeys(questions["context"])
        yield from questions["question"]

    tokenizer = load_tokenizer(model_arguments, training, texts(), pairs=True)
    count_from_left(tokenizer)
    model = make_model(model_arguments, AutoModelForQuestionAnswering, tokenizer, {})
    length = min(data_arguments.max_length, tokenizer.model_max_length)
    settings = {
        "tokenizer": tokenizer,
        "max_length": length,
        "stride": data_arguments.doc_stride,
        "token_types": getattr(model.config, "type_vocab_size", 0) > 1,
    }
    windows = data.map(
        partial(make_windows, **settings), batched=True, with_indices=True, remove_columns=list(COLUMNS)
    )
    # Trainer goes by the names in `forward`, and would leave out what a model takes among its `**kwargs`.
    training.remove_unused_columns = False
    names = {*tokenizer.model_input_names, "start_positions", "end_positions"}
    inputs = {
        split: part.select_columns([name for name in part.column_names if name in names])
        for split, part in windows.items()
    }
    padding = {"padding": "max_length", "max_length": length} if data_arguments.pad_to_max_length else {}
    trainer = RepeatableTrainer(
        model=model,
        args=training,
        train_dataset=inputs.get("train"),
        eval_dataset=inputs.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, **padding),
        compute_metrics=partial(
            answer_metrics,
            questions=data.get("validation"),
            windows=windows.get("validation"),
            arguments=data_arguments,
            folder=Path(training.output_dir) if training.should_save else None,
        ),
        # Of what else a model returns nothing is wanted.
        preprocess_logits_for_metrics=lambda logits, labels: logits[:2],
    )
    return run_classifier(trainer, training, None, model_arguments.save_dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
