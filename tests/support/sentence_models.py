"""Tiny models of sentence-transformers: of every class, and folders of every kind that the library saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
)
from support.tiny_decoders import SIZES
from support.tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

try:
    from sentence_transformers import MultiVectorEncoder  # of newer versions
except ImportError:
    MultiVectorEncoder = None

WORDS = [f"w{number}" for number in range(50)]
UPPER = [word.upper() for word in WORDS[:5]]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTHS = (33, 9, 40, 21, 12, 38)
HEADS = {
    SentenceTransformer: AutoModel,
    SparseEncoder: AutoModelForMaskedLM,
    CrossEncoder: AutoModelForSequenceClassification,
}
if MultiVectorEncoder is not None:
    HEADS[MultiVectorEncoder] = AutoModel
POSITIONS = 64


def texts(lengths: tuple[int, ...] = LENGTHS, *, words: list[str] = WORDS) -> list[str]:
    """Texts of so many words, of all lengths in no order."""
    draw = torch.Generator().manual_seed(7)
    return [" ".join(words[int(i)] for i in torch.randint(len(words), (n,), generator=draw)) for n in lengths]


def save_tokenizer(folder: Path, *, left: bool = False) -> None:
    """A tokenizer of words that tells upper from lower case."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS + UPPER)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    single = "$A [SEP]" if left else "[CLS] $A [SEP]"
    backend.post_processor = processors.TemplateProcessing(single, "[CLS] $A [SEP] $B [SEP]", marks)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    side = "left" if left else "right"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, mask_token="[MASK]", padding_side=side, model_max_length=POSITIONS
    ).save_pretrained(folder)


def save_plain(folder: Path, kind: Any = SentenceTransformer, *, left: bool = False, **changes: Any) -> str:
    """What transformers saves: a model with the head of a class, or a decoder padded on the left, and a tokenizer."""
    head = {"num_labels": 1} if kind is CrossEncoder else {}
    if left:
        torch.manual_seed(0)
        sizes = SIZES["qwen3"] | {"vocab_size": 60, "initializer_range": 0.3}
        AutoModel.from_config(AutoConfig.for_model("qwen3", **sizes)).save_pretrained(folder)
    else:
        tiny_model("bert", HEADS[kind], **head, **changes).save_pretrained(folder)
    save_tokenizer(folder, left=left)
    return str(folder)


def _modules(folder: Path, *more: Any, mode: str = "mean", left: bool = False, **options: Any) -> list[Any]:
    transformer = Transformer(save_plain(folder, left=left), **options)
    return [transformer, Pooling(transformer.get_embedding_dimension(), mode), *more]


def _made(modules: list[Any], **options: Any) -> Any:
    return SentenceTransformer(modules=modules, device="cpu", **options)


def _static(folder: Path) -> Any:
    torch.manual_seed(0)
    save_tokenizer(folder)
    return StaticEmbedding(PreTrainedTokenizerFast.from_pretrained(folder)._tokenizer, embedding_dim=32)


def _router(folder: Path, query: list[Any]) -> Any:
    document = [Transformer(save_plain(folder / "document", seed=3)), Pooling(32, "cls")]
    return _made([Router.for_query_document(query, document), Normalize()])


def _dense(*sizes: int, **options: Any) -> Any:
    torch.manual_seed(1)
    return Dense(*sizes, **options)


PROMPTS = {"query": "w1 w2 w3 ", "document": "w4 w5 "}
# A model of every kind, from an empty folder for its parts.
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "mean": lambda folder: _made(_modules(folder)),
    "cls": lambda folder: _made(_modules(folder, mode="cls")),
    "last token, left padding": lambda folder: _made(_modules(folder, mode="lasttoken", left=True)),
    "two poolings": lambda folder: _made([_modules(folder)[0], Pooling(32, ("mean", "max"))]),
    "dense, truncated": lambda folder: _made(
        _modules(folder, _dense(32, 16), Normalize()), truncate_dim=5, similarity_fn_name="dot"
    ),
    "before the pooling": lambda folder: _made(
        [_modules(folder)[0], _dense(32, 16, module_input_name="token_embeddings"), Pooling(16, "mean")]
    ),
    "normalized before the end": lambda folder: _made(_modules(folder, Normalize(), _dense(32, 16))),
    "lower case": lambda folder: _made(_modules(folder, do_lower_case=True)),
    "prompts": lambda folder: _made(_modules(folder), prompts=PROMPTS, default_prompt_name="query"),
    "short": lambda folder: _made(_modules(folder, max_seq_length=20)),
    "router": lambda folder: _router(folder, _modules(folder / "query")),
    "router, static queries": lambda folder: _router(folder, [_static(folder / "query")]),
    **{
        kind.__name__: lambda folder, kind=kind: kind(save_plain(folder, kind), device="cpu")  # type: ignore[misc]
        for kind in HEADS
        if kind is not SentenceTransformer
    },
}


def outputs(model: Any, read: list[str] | None = None, **options: Any) -> list[torch.Tensor]:
    """All that a model makes of some texts, queries among them; scores of a CrossEncoder."""
    read = texts(words=WORDS + UPPER) if read is None else read
    if isinstance(model, CrossEncoder):
        return [torch.as_tensor(model.predict([(read[0][:20], text) for text in read], **options))]
    encoded = [encode(read, **options) for encode in (model.encode_document, model.encode_query)]
    if isinstance(encoded[0], list):  # of a vector for each token
        return [torch.as_tensor(row) for vectors in encoded for row in vectors]
    return [torch.as_tensor(row.to_dense() if getattr(row, "is_sparse", False) else row) for row in encoded]


def same(actual: list[torch.Tensor], expected: list[torch.Tensor], atol: float = 1e-5) -> bool:
    """Whether outputs are alike but for rounding."""
    return all(torch.allclose(vector, other, atol=atol) for vector, other in zip(actual, expected, strict=True))


def inside(model: Any) -> Any:
    """The model of transformers that a model of sentence-transformers begins with."""
    return model[0].auto_model


def train_tables(model: Any) -> None:
    """Give the position tables of a conversion, if there are any, other values than those that they begin with."""
    for name, parameter in model.named_parameters():
        if "hf_effattn_cst" in name and "original_module" not in name:
            torch.nn.init.normal_(parameter)
