r"""Train or evaluate a classifier of texts or of pairs of texts, with transformers' `Trainer`.

Data comes from the Hub by name, from local JSON-lines, CSV or TSV files, or from files that hold one class each, a
text a line. The model is a checkpoint, plain or with its attention replaced, or one from scratch.

    python scripts/train/classification.py --dataset_name stanfordnlp/imdb --model_name_or_path roberta-base \
        --method "i-clustered clusters=25 topk=32 min_length=0" --output_dir runs/imdb \
        --do_train --do_eval
    python scripts/train/classification.py --train_files train.jsonl.gz --test_files test.jsonl.gz \
        --model_type cst --config_overrides slice_length=16,max_position_embeddings=4096 --tokenizer_name bytes \
        --output_dir runs/bytes --do_train --do_predict --bf16
    python scripts/train/classification.py --class_files rt-polarity.neg rt-polarity.pos --model_type clusterformer \
        --config_overrides clusters=8,max_position_embeddings=64 --max_length 64 --encoding latin-1 \
        --output_dir runs/mr --do_train --do_eval

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder. The metrics are printed and
kept in `all_results.json` there; `--do_predict` writes the classes of the test's texts, which need no labels, to
`predictions.tsv`, by the numbers of their rows from 0. A fine-tuned checkpoint keeps the order of its classes.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from hf_effattn.data.labelled_texts import GIVEN_BY, GIVEN_WITHOUT_TRAINING, DataArguments, load_texts
from hf_effattn.training import (
    ModelArguments,
    RepeatableTrainer,
    accuracy,
    check_positions,
    check_splits,
    class_order,
    drawn_samples,
    in_order,
    label_settings,
    length_settings,
    load_tokenizer,
    make_model,
    parse_settings,
    parsed_arguments,
    run_classifier,
    tokenize_texts,
    training_split,
    used_splits,
    write_predictions,
)


def rows_of_test(count: int, drawn: int | None, seed: int) -> list[int]:
    """The numbers of the rows that `drawn_samples` takes of a test of `count` rows."""
    numbers = DatasetDict({"test": Dataset.from_dict({"row": range(count)})})
    return drawn_samples(numbers, {"test": drawn}, seed)["test"]["row"][:]


def check_length(arguments: ModelArguments, needed: Mapping[str, int], max_length: int) -> None:
    """That a model from scratch has the positions that `length_settings` says it needs.

    Raises:
        ValueError: its settings name fewer.
    """
    overrides = parse_settings(arguments.config_overrides)
    for name, count in needed.items():
        if overrides.get(name, count) < count:
            raise ValueError(
                f"--max_length {max_length} needs {name}={count} or more, and --config_overrides has"
                f" {name}={overrides[name]}: cut texts with a lower --max_length, or leave out {name}"
            )


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and predict as the arguments say; returns the metrics."""
    model_arguments, data_arguments, training = parsed_arguments(__doc__, command_line, DataArguments)
    check_positions(model_arguments, data_arguments.max_length)
    data = load_texts(data_arguments, hold_out=training.do_train and training.do_eval)
    check_splits(data, training, GIVEN_BY if training.do_train else GIVEN_WITHOUT_TRAINING)
    labelled = [rows.features["label"].names for rows in data.values() if "label" in rows.column_names]
    outputs = class_order(next(iter(labelled), []), model_arguments, training, fewer=not training.do_train)
    if not outputs:
        raise ValueError("no classes: the texts have no labels, and no classifier is named by --model_name_or_path")
    data = in_order(data, outputs)
    columns = list(filter(None, [data_arguments.text_column, data_arguments.text_pair_column]))

    def texts() -> Iterator[str]:
        for column in columns:
            yield from (row[column] for row in training_split(data))

    tokenizer = load_tokenizer(model_arguments, training, texts(), pairs=len(columns) == 2)
    lengths = length_settings(model_arguments, tokenizer, data_arguments.max_length)
    check_length(model_arguments, lengths, data_arguments.max_length)
    most = {
        "train": data_arguments.max_train_samples,
        "validation": data_arguments.max_eval_samples,
        "test": data_arguments.max_predict_samples,
    }
    examples = {
        split: rows.map(
            partial(tokenize_texts, tokenizer=tokenizer, columns=columns, max_length=data_arguments.max_length),
            batched=True,
            remove_columns=[name for name in rows.column_names if name != "label"],
        )
        for split, rows in drawn_samples(used_splits(data, training), most, data_arguments.split_seed).items()
    }
    defaults = label_settings(outputs) | lengths
    model = make_model(model_arguments, AutoModelForSequenceClassification, tokenizer, defaults)
    trainer = RepeatableTrainer(
        model=model,
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy(),
    )

    def keep_classes(numbers: np.ndarray) -> None:
        rows = rows_of_test(len(data["test"]), data_arguments.max_predict_samples, data_arguments.split_seed)
        named = zip(rows, (outputs[number] for number in numbers), strict=True)
        write_predictions(Path(training.output_dir) / "predictions.tsv", named)

    return run_classifier(trainer, training, examples.get("test"), model_arguments.save_dtype, keep_classes)


if __name__ == "__main__":
    main(sys.argv[1:])
