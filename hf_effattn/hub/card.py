"""Model cards: what a model of this package is, how it is loaded, what was measured of it, in the Hub's format."""

import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from ..measuring.candidates import ALWAYS_NAMED, candidate_names, name_settings
from ..models import ClusterFormerConfig, CSTConfig
from ..patching.methods import Method, list_methods
from ..patching.methods.per_head import PerHead
from ..patching.model_types.stacks import longest_input
from ..patching.model_types.table import MODEL_TYPES
from ..patching.sentence_transformers import is_sentence_transformer, models_inside
from ..patching.stored import FIELD, base_model_of, read_stored
from ..patching.transformers_internals import implementation_of
from ..reporting import Report
from ..reporting.table import markdown, report_table, table_note
from . import module_folders
from .heads import TASKS, auto_class_of

TAG = "hf_effattn"
PER_HEAD = ("candidates", "heads", "calibration")  # which a card tells in a table of their own
LIBRARY = "sentence-transformers"
VYAS = (
    "Vyas, Katharopoulos, Fleuret: Fast Transformers with Clustered Attention. NeurIPS 2020, "
    "<https://arxiv.org/abs/2007.04825>"
)
LEE = (
    "Lee et al.: Composite Slice Transformer: An Efficient Transformer with Composition of Multi-Scale Multi-Range "
    "Attentions. ICLR 2023, <https://openreview.net/forum?id=nWTzIsgrYNN>"
)
WANG = "Wang et al.: ClusterFormer: Neural Clustering Attention for Efficient and Effective Transformer. ACL 2022"
SOURCES = {
    "clustered": VYAS,
    "i-clustered": VYAS,
    "bi-clustered": VYAS,
    "per-head": VYAS,
    "cst": LEE,
    "clusterformer": WANG,
}
LOADING = "\n## How to load it\n"  # the template's heading
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
# What makes the attention of a model from scratch what it is.
OF_ATTENTION: dict[str, tuple[str, ...]] = {
    "cst": ("slice_length", "extension_ratio", "composition", "position_embedding", "pooling", "num_global_tokens"),
    "clusterformer": (
        *("clusters", "window_blocks", "assignment", "decoder_assignment", "similarity", "gated"),
        *("attend_centroids", "cluster_loss_weight", "sorting_loss_weight"),
    ),
}


def model_card(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    name: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: Sequence[str] | None = None,
    report: Report | None = None,
    evaluations: Sequence[EvalResult] = (),
    description: str | None = None,
    sections: Mapping[str, str] | None = None,
    limits: Sequence[str] = (),
    loaded_by: str | None = None,
) -> ModelCard:
    """The card of a patched, converted or from-scratch model, with the Hub's metadata.

    Args:
        model (`PreTrainedModel` or `PreTrainedConfig`): the model; its configuration is all that is read. Or a model
            of sentence-transformers: the configuration of the transformers model inside, of several the first.
        name (`str`, *optional*): the title. Default: the last part of `repo_id`, or of where the model came from.
        repo_id (`str`, *optional*): what the lines that load it name. Default: `name`.
        base_model (`str`, *optional*): the pretrained model's id on the Hub. Default: where a patched or converted
            model was loaded from, unless that is a folder.
        license (`str`, *optional*): the Hub's identifier, such as `"apache-2.0"`.
        language (`str` or `list[str]`, *optional*): such as `"en"`.
        datasets (`Sequence[str]`, *optional*): ids on the Hub of what it was trained on.
        report (`Report`, *optional*): from `hf_effattn.report`; becomes a table with hardware and versions.
        evaluations (`Sequence[EvalResult]`): become a table and `model-index`, which the Hub shows.
        description (`str`, *optional*): Markdown below the first paragraph.
        sections (`Mapping[str, str]`, *optional*): further headings with their Markdown, such as how it was trained.
        limits (`Sequence[str]`): sentences to add to those that hold for every model of its kind.
        loaded_by (`str`, *optional*): the class of sentence-transformers that loads it, such as
            `"SentenceTransformer"`. Default: the model's, or one of transformers.

    Returns:
        `huggingface_hub.ModelCard`: `.save("README.md")`, `.push_to_hub(repo_id)`.

    Raises:
        ValueError: `config.effattn` cannot be read (see `hf_effattn.from_pretrained`), a report of another kind of
            model.
        TypeError: neither a model nor a configuration.

    Warns where the attention was switched by `attn_implementation=` alone, which is not saved, and where the report
    measures other settings than the model has.
    """
    if is_sentence_transformer(model) and not isinstance(model, type):
        loaded_by, model = loaded_by or type(model).__name__, models_inside(model)[0]
    if not isinstance(model, PreTrainedModel | PreTrainedConfig):
        raise TypeError(
            f"model must be a transformers model or its configuration, got {type(model).__name__}; load it with "
            "from_pretrained, or its configuration with AutoConfig.from_pretrained"
        )
    config = model.config if isinstance(model, PreTrainedModel) else model
    named = [type(model).__name__] if isinstance(model, PreTrainedModel) else config.architectures
    architecture = named[0] if named else None
    auto_class = None if architecture is None else auto_class_of(config, architecture)
    settings, layers = _stored_in(config)
    kind = settings.method if settings is not None else config.model_type
    name = name or (repo_id or _name_of(str(config._name_or_path or "")) or kind).split("/")[-1]
    if settings is None and implementation_of(config) in list_methods():
        warnings.warn(
            f'the attention of this model was switched to "{implementation_of(config)}", which save_pretrained does '
            "not keep: the card is of the exact model. patch_attention writes it into the configuration",
            stacklevel=2,
        )
    if base_model is None and settings is not None:
        base_model = base_model_of(_patched(config))
    if report is not None and report.environment.get("model_type", config.model_type) != config.model_type:
        raise ValueError(
            f"the report is of a model of type {report.environment['model_type']!r}, this one is "
            f"{config.model_type!r}: give the report that was measured on it"
        )
    if report is not None and settings is not None and name_settings(settings, layers) not in report.methods:
        warnings.warn(
            f"the report measures {', '.join(report.methods)}, and this model runs {name_settings(settings, layers)}: "
            "the card's costs are not its own. Measure the patched model, `effattn report` with its folder",
            stacklevel=2,
        )
    data = ModelCardData(
        base_model=base_model,
        license=license,
        language=language,
        library_name="transformers" if loaded_by is None else LIBRARY,
        pipeline_tag=module_folders.TASKS.get(loaded_by or "", None if auto_class is None else TASKS[auto_class]),
        tags=[TAG, *([kind] if kind in SOURCES else []), *([] if loaded_by is None else [LIBRARY])],
        datasets=None if datasets is None else list(datasets),
        model_name=name,
        eval_results=list(evaluations) or None,
    )
    return ModelCard.from_template(
        data,
        template_str=files(__package__).joinpath("card.md").read_text(encoding="utf-8"),
        name=name,
        opening=_opening(config, kind, settings, layers, base_model),
        description=(description or "").strip(),
        package=TAG if loaded_by is None else f"'{TAG}[{LIBRARY}]'",
        loading=loading_code(config, architecture, repo_id or name, loaded_by),
        without=_without_the_package(settings, kind, "transformers" if loaded_by is None else LIBRARY),
        settings=_settings(config, settings, layers),
        costs="" if report is None else _costs(report),
        results=_results(evaluations),
        sections=sections or {},
        limits=[*_limits(config, settings), *limits],
        sources=[SOURCES[kind]] if kind in SOURCES else [],
    )


def _name_of(origin: str) -> str:
    folder = Path(origin)
    return (folder.resolve() if folder.is_dir() else folder).name if origin else ""


def _patched(config: Any) -> Any:
    """The configuration that says how it is patched, of the model or of an encoder inside it; None where none does."""
    configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return next((part for part in configs if getattr(part, FIELD, None) is not None), None)


def patch_of(config: Any) -> Method | None:
    """The method that a configuration says, of the model or of an encoder inside it; None where none does."""
    return _stored_in(config)[0]


def _stored_in(config: Any) -> tuple[Method | None, Sequence[int] | None]:
    """The method that the configuration says, and the layers that have it; None: all."""
    patched = _patched(config)
    return (None, None) if patched is None else read_stored(getattr(patched, FIELD))


def _opening(
    config: Any, kind: str, settings: Method | None, layers: Sequence[int] | None, base_model: str | None
) -> str:
    if settings is not None:
        of = "a pretrained model" if base_model is None else f"[{base_model}](https://huggingface.co/{base_model})"
        what = settings.summary
        if settings.needs_fine_tuning:
            return (
                f'The attention of {of} converted to `"{kind}"` by hf_effattn{_where(layers)}: {what}. All pretrained '
                "weights were kept, two small tables of position embeddings were added."
            )
        if settings.stays_exact:
            return f'{of[0].upper()}{of[1:]} that runs by `"{kind}"` of hf_effattn: {what}. No weights were changed.'
        return (
            f'{of[0].upper()}{of[1:]} with its self-attention{_where(layers)} replaced by `"{kind}"` of hf_effattn: '
            f"{what}. A patch changes no weights and needs no training."
        )
    if kind == CSTConfig.model_type and config.composition == "full":
        return "The Transformer that Composite Slice Transformers are compared with, trained with hf_effattn."
    if kind == CSTConfig.model_type:
        return (
            "A Composite Slice Transformer, trained from scratch with hf_effattn: a token attends to the tokens of "
            "its slice exactly and to the rest of the text by one embedding per slice."
        )
    if kind == ClusterFormerConfig.model_type:
        return (
            "A ClusterFormer, trained from scratch with hf_effattn: words are sorted by learned clusters, and a word "
            "attends to those near it in that order."
        )
    return "A model with exact attention, made with the training scripts of hf_effattn."


def _where(layers: Sequence[int] | None) -> str:
    """In which layers, where not in all."""
    if layers is None:
        return ""
    return f" in layer{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))}"


def loading_code(config: PreTrainedConfig, architecture: str | None, path: str, loaded_by: str | None = None) -> str:
    """The lines of Python that load a model.

    Args:
        config (`PreTrainedConfig`): of the model.
        architecture (`str`, *optional*): the name of its class. Default: the base model's.
        path (`str`): a folder, or a name on the Hub.
        loaded_by (`str`, *optional*): the class of sentence-transformers that loads it. Default: one of transformers.
    """
    settings, kind = patch_of(config), config.model_type
    auto_class = None if architecture is None else auto_class_of(config, architecture)
    wanted = auto_class or architecture or "AutoModel"
    ours = auto_class is None and kind in OF_ATTENTION
    library = "hf_effattn" if ours else _module_of(config, wanted)
    call = f"{wanted}.from_pretrained"
    if loaded_by is not None:
        library, call, wanted = LIBRARY.replace("-", "_"), loaded_by, loaded_by
    lines = [f"from {library} import {wanted}", ""]
    if settings is not None:
        return "\n".join(["import hf_effattn", *lines, f'model = hf_effattn.from_pretrained({wanted}, "{path}")'])
    lines.append(f'model = {call}("{path}")')
    if kind in OF_ATTENTION:
        return "\n".join(["import hf_effattn  # tells transformers what this model is", *lines])
    if not _can_be_patched(config):
        return "\n".join(lines)
    patch = 'hf_effattn.patch_attention(model, "i-clustered", min_length=0)  # exact without this line'
    return "\n".join(["import hf_effattn", *lines, patch])


def _module_of(config: PreTrainedConfig, name: str) -> str:
    """Where a class of transformers is imported from: a part, such as the encoder of two, is not at its top."""
    modelling = type(config).__module__.replace(".configuration_", ".modeling_")
    at_top = hasattr(transformers, name) or not modelling.startswith("transformers.")
    return "transformers" if at_top else modelling


def _can_be_patched(config: Any) -> bool:
    """Whether `patch_attention` serves a model of this configuration, or an encoder inside it."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        entry = MODEL_TYPES.get(getattr(part, "model_type", ""))
        if entry is not None and (entry.causal or not getattr(part, "is_decoder", False)):
            return True
    return False


def loaded_from(card: str, path: str) -> str:
    """A card of this package whose loading code names another place; any other card as it is.

    Args:
        card (`str`): its whole text.
        path (`str`): a folder, or a name on the Hub.
    """
    if TAG not in (getattr(ModelCard(card, ignore_metadata_errors=True).data, "tags", None) or []):
        return card
    before, heading, after = card.partition(LOADING)  # what the user wrote before may load another model
    calls = "|".join(["from_pretrained", *module_folders.TASKS])
    named = re.sub(rf'(\b(?:{calls})\((?:\w+, )?)"[^"\n]*"', lambda match: f'{match[1]}"{path}"', after, count=1)
    return before + heading + named


def _without_the_package(settings: Method | None, kind: str, library: str) -> str:
    if settings is not None and settings.needs_fine_tuning:
        return (
            f"{library} alone loads the pretrained architecture with exact attention, and names the tables "
            "`hf_effattn_cst` as unexpected. Once fine-tuned, the weights are for slices: load it as above."
        )
    if settings is not None:
        return f"Without the package the same files load as the exact model, by {library} alone."
    if kind in OF_ATTENTION:
        return (
            f"If transformers does not recognize the architecture `{kind}`, the package is missing or not imported: "
            "type the lines above."
        )
    return f"{library} alone is enough to load it."


def _settings(config: Any, settings: Method | None, layers: Sequence[int] | None) -> str:
    if settings is not None and settings.stays_exact:
        return ""
    if settings is not None:
        defaults = type(settings)().to_dict()
        rows = [
            [f"`{name}`", f"`{value!r}`", settings.purpose[name]]
            for name, value in settings.to_dict().items()
            if (name in ALWAYS_NAMED or value != defaults.get(name)) and name not in PER_HEAD
        ]
        if layers is not None:
            rows.append(["`layers`", f"`{list(layers)!r}`", "the layers that have it, from 0; the others stay exact"])
        if isinstance(settings, PerHead):
            return "\n\n".join(
                [
                    *_candidates(settings),
                    *([markdown(["setting", "value", "meaning"], rows, right=())] if rows else []),
                ]
            )
        others = "\n\nAll others have their defaults, which `effattn methods` lists."
        return markdown(["setting", "value", "meaning"], rows, right=()) + others
    names = (*SIZES, *OF_ATTENTION.get(config.model_type, ()))
    rows = [[f"`{name}`", f"`{getattr(config, name)!r}`"] for name in names if getattr(config, name, None) is not None]
    return markdown(["setting", "value"], rows, right=())


def _candidates(settings: PerHead) -> list[str]:
    """Which settings how many heads run, and how they were found."""
    heads = [index for row in settings.heads for index in row]
    table = [[name, str(heads.count(index))] for index, name in enumerate(candidate_names(settings))]
    paragraphs = [markdown(["settings", "key/value heads"], table)]
    made = settings.calibration
    if made is not None and "max_error" in made:
        lengths = ", ".join(f"{length:,}" for length in made["lengths"])
        kept, counted = "Each head has the cheapest that kept the relative L2 error of its attention output", "heads"
        if made["error_of"] == "layer":
            kept, counted = "The heads take the least time in which the layers' mean relative L2 error kept", "texts"
        paragraphs.append(
            f"{kept} within {made['max_error']:g} on {made['texts']} texts of {lengths} tokens; of those left out, "
            f"{100 * made['held_out']:.0f}% of the {counted} did, and attention was {made['speed']:.1f} times as fast "
            "as exact attention. The table of heads is in `config.json`."
        )
    return paragraphs


def _costs(report: Report) -> str:
    header, rows = report_table(report)
    table = markdown(header, rows, right=range(2, len(header)))
    return f"Against exact attention in the same run.\n\n{table}\n\n<sub>{table_note(report)}</sub>"


def _results(evaluations: Sequence[EvalResult]) -> str:
    if not evaluations:
        return ""
    rows = []
    for metric in evaluations:
        split = "" if metric.dataset_split is None else f", {metric.dataset_split}"
        value = f"{metric.metric_value:.4g}" if isinstance(metric.metric_value, float) else str(metric.metric_value)
        rows.append([f"{metric.dataset_name}{split}", metric.metric_name or metric.metric_type, value])
    return markdown(["data", "metric", "value"], rows, right=(2,))


def _limits(config: Any, settings: Method | None) -> list[str]:
    if settings is not None and settings.needs_fine_tuning:
        return [
            "A conversion changes what the model computes. It is as good as its fine-tuning, on texts like those it "
            "was fine-tuned on; before fine-tuning it is useless.",
            "`slice_length` and `extension_ratio` belong to the weights: loaded with others it fails.",
        ]
    if settings is not None and settings.stays_exact:
        return [
            "Outputs differ from the exact model's by rounding. Layers with windows gain nothing on inputs of a few "
            "windows or fewer."
        ]
    if settings is not None:
        shortest = settings.min_length
        from_where = "the length from which the method is faster" if shortest is None else f"{shortest:,} tokens"
        lines = [
            "Outputs differ from the exact model's. The errors of the layers add up, and grow with the length as long "
            "as the settings stay: measure them on your own texts, `hf_effattn.report(model, inputs)`.",
        ]
        if shortest != 0:
            lines.append(f"Inputs shorter than {from_where} run exact attention.")
        return [*lines, *_longest(config)]
    return _longest(config)


def _longest(config: Any) -> list[str]:
    longest = longest_input(config)
    if longest is None:  # none that is learned; then the configuration counts tokens
        longest = getattr(config, "max_position_embeddings", None)
    return [] if longest is None else [f"Inputs of up to {longest:,} tokens."]
