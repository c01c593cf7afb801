"""Model and tokenizer of a run: a checkpoint's or from scratch, for which lengths and classes, with which method."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import hf_effattn

from ..patching.model_types.stacks import longest_input
from ..patching.model_types.table import MODEL_TYPES
from ..settings_parsing import method_of, parse_settings
from .arguments import NO_MODEL, ModelArguments
from .run import checkpoint_to_resume

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
BYTES = "bytes"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, pairs: bool = False, masks: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2 has one, fitted on the texts.

    Args:
        texts (`Iterable[str]`): what it is fitted on.
        vocab_size (`int`): tokens, at least 257.
        pairs (`bool`): put the mark of a text's end before the first text and between the two, and number them by
            `token_type_ids`. Otherwise there is nothing but the text.
        masks (`bool`): have a mask token.
    """
    bpe = ByteLevelBPETokenizer()
    special = [END_OF_TEXT, MASK] if masks else [END_OF_TEXT]
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special, show_progress=False)
    if pairs:
        bpe._tokenizer.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B:1",
            special_tokens=[(END_OF_TEXT, bpe.token_to_id(END_OF_TEXT))],
        )
    segments = ["token_type_ids"] if pairs else []
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        model_input_names=["input_ids", *segments, "attention_mask"],
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK if masks else None,
    )


def load_tokenizer(
    arguments: ModelArguments, training: TrainingArguments, texts: Iterable[str], **kinds: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, the model's, that of a run which is resumed, or one made of `texts`.

    `kinds` are what `train_tokenizer` can be asked for; bytes and existing tokenizers are what they are.
    """
    if arguments.tokenizer_name == BYTES:
        return ByT5Tokenizer(extra_ids=0)
    if arguments.tokenizer_name is None and arguments.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path, revision=arguments.model_revision)
    name = arguments.tokenizer_name or checkpoint_to_resume(training)
    return AutoTokenizer.from_pretrained(name) if name else train_tokenizer(texts, arguments.vocab_size, **kinds)


def make_model(
    arguments: ModelArguments, auto_class: Any, tokenizer: PreTrainedTokenizerBase, defaults: dict[str, Any]
) -> Any:
    """The checkpoint, or a model of `model_type` with random weights; its attention replaced where a method is named.

    The tokenizer of a model from scratch is told how many tokens it takes, which is what pipelines cut texts to.

    Args:
        arguments (`ModelArguments`): which model.
        auto_class: transformers' class that makes it, such as `AutoModelForCausalLM`.
        tokenizer (`PreTrainedTokenizerBase`): gives the vocabulary and special tokens of a model from scratch.
        defaults (`dict`): settings that the task wants, such as `num_labels`; `config_overrides` win.

    Raises:
        ValueError: neither a checkpoint nor a kind of model is named, or a setting that the model does not know.
    """
    overrides = defaults | parse_settings(arguments.config_overrides)
    if arguments.model_name_or_path is not None:
        path, revision = arguments.model_name_or_path, arguments.model_revision
        # One that was saved with its attention replaced comes back so.
        patched = getattr(AutoConfig.from_pretrained(path, revision=revision), "effattn", None) is not None
        load = partial(hf_effattn.from_pretrained, auto_class) if patched else auto_class.from_pretrained
        options: dict[str, Any] = {"revision": revision, "ignore_mismatched_sizes": arguments.ignore_mismatched_sizes}
        model = load(path, **options, **overrides)
    elif arguments.model_type is not None:
        special = {
            name: getattr(tokenizer, name)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            if getattr(tokenizer, name) is not None
        }
        config = AutoConfig.for_model(arguments.model_type)
        unknown = [name for name in overrides if not hasattr(config, name)]
        if unknown:
            raise ValueError(f"a {arguments.model_type!r} model has no setting {', '.join(map(repr, unknown))}")
        config = AutoConfig.for_model(arguments.model_type, **{"vocab_size": len(tokenizer)} | special | overrides)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None:
            tokenizer.model_max_length = positions - reserved_positions(arguments.model_type, tokenizer)
        model = auto_class.from_config(config)
    else:
        raise ValueError(NO_MODEL)
    if arguments.method is not None:
        hf_effattn.patch_attention(model, **method_of(arguments.method))
    return model


def length_settings(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, int]:
    """What the configuration of a model from scratch needs to take texts of `length` tokens; nothing for others."""
    if arguments.model_type is None or arguments.model_name_or_path is not None:
        return {}
    # One name of the longest input for GPT-2, another for all others.
    name = "n_positions" if arguments.model_type == "gpt2" else "max_position_embeddings"
    if not hasattr(AutoConfig.for_model(arguments.model_type), name):
        return {}
    return {name: length + reserved_positions(arguments.model_type, tokenizer)}


def check_positions(arguments: ModelArguments, max_length: int) -> None:
    """That a named checkpoint has positions for texts of `max_length` tokens; the first step would fail otherwise.

    Raises:
        ValueError: it has fewer.
    """
    named = arguments.model_name_or_path
    if named is None:
        return
    longest = longest_input(AutoConfig.from_pretrained(named, revision=arguments.model_revision))
    if longest is not None and longest < max_length:
        raise ValueError(
            f"--max_length {max_length}, but {named} has positions for {longest} tokens: lower --max_length, or make a"
            f' longer copy first, `effattn convert {named} mine --method "cst slice_length=16" --max-length'
            f" {max_length}`, and train it by --model_name_or_path mine without --method"
        )


def reserved_positions(model_type: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Positions that no token has, as RoBERTa's begin behind the number of the padding."""
    known = MODEL_TYPES.get(model_type)
    shifted = known is not None and known.learned is not None and known.learned.reserved_by_padding
    return tokenizer.pad_token_id + 1 if shifted else 0


def label_settings(names: Sequence[str]) -> dict[str, Any]:
    """Settings of a classifier's configuration: its classes by their numbers."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def tokenize_texts(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], max_length: int
) -> dict[str, Any]:
    """Token numbers of texts, or of pairs where two columns are named, cut to the length that is allowed."""
    return dict(tokenizer(*(rows[column] for column in columns), truncation=True, max_length=max_length))
