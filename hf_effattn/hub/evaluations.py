"""What a training script printed at its end, as evaluation results of the Hub."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult

# As `Trainer` names them; what remains are the metrics.
PREFIXES = {"eval_": "validation", "test_": "test", "predict_": "test"}
NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "samples", "model_preparation_time")


def evaluations_of(
    results: Mapping[str, Any],
    *,
    task: str,
    dataset: str,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
) -> list[EvalResult]:
    """The metrics of validation and test in the file `all_results.json` of a training.

    Args:
        results (`Mapping`): of the file.
        task (`str`): the Hub's name of the task, such as `"text-classification"`.
        dataset (`str`): its id on the Hub, such as `"stanfordnlp/sst2"`.
        dataset_name (`str`, *optional*): to show. Default: the id's last part.
        dataset_config (`str`, *optional*): the configuration, such as `"sst2"` of `"nyu-mll/glue"`.

    Returns:
        `list[EvalResult]`: one per metric and split.

    Raises:
        ValueError: there is no metric in it, or it is no file of results.
    """
    if not isinstance(results, Mapping):
        raise ValueError(
            f"the results must be the names and values in all_results.json, got a {type(results).__name__}: give the "
            "file that a training wrote at its end"
        )
    evaluations = []
    for name, value in results.items():
        prefix = next((start for start in PREFIXES if name.startswith(start)), None)
        metric = name.removeprefix(prefix or "")
        if prefix is None or metric in NOT_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        evaluations.append(
            EvalResult(
                task_type=task,
                dataset_type=dataset,
                dataset_name=dataset_name or dataset.split("/")[-1],
                dataset_config=dataset_config,
                dataset_split=PREFIXES[prefix],
                metric_type=metric,
                metric_value=value,
            )
        )
    if not evaluations:
        raise ValueError(
            f"no metric among {', '.join(results) or 'nothing'}: give the all_results.json of a run with --do_eval or "
            "--do_predict, whose metrics begin with eval_, test_ or predict_"
        )
    return evaluations
