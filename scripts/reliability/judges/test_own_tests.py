"""transformers' own tests of a model, on CST, ClusterFormer and patched models.

`..versions` lays the tests out as the package `transformers_tests`. What is expected to fail stands in
`exceptions.toml`, each with its reason.
"""

import unittest
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers
from support.tiny_decoders import SIZES as DECODERS
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import get_values
from transformers_tests import test_modeling_common

import hf_effattn
from hf_effattn import models as our_models
from hf_effattn.patching.model_types.table import MODEL_TYPES

BATCH, LENGTH, VOCABULARY = 3, 9, 99
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = (
    "MaskedLM", "CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
)  # fmt: skip
SETTINGS: dict[str, Any] = {"clusters": 3, "topk": 4, "min_length": 0}
# So short that the inputs have tokens before their last segment, and fewer keys recomputed than there are of these.
CAUSAL: dict[str, Any] = {"clusters": 2, "exact_keys": 12, "segment_length": 4, "window": 4, "min_length": 0}


def with_ours(mapping: Any) -> list[Any]:
    """The classes of a table of transformers, and ours of the same kind, which are not in it."""
    names = [name for name in get_values(mapping) if isinstance(name, str)]
    kinds = {name.removeprefix(there) for name in names for there in ("Bert", "Llama") if name.startswith(there)}
    return [*get_values(mapping), *(f"{ours}{kind}" for kind in kinds for ours in ("CST", "ClusterFormer"))]


test_modeling_common.get_values = with_ours


def patched(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of the same name whose models are patched as they are made."""

    def make(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **settings: Any) -> None:
        if cls is transformers.ViTModel:  # the tests mask patches; its tests in transformers take other classes
            settings.setdefault("use_mask_token", True)
        cls.__init__(self, config, *args, **settings)
        hf_effattn.patch_attention(
            self, "i-clustered", **CAUSAL if MODEL_TYPES[config.model_type].causal else SETTINGS
        )

    return type(cls.__name__, (cls,), {"__init__": make, "__module__": cls.__module__})


class ModelTester:
    """What transformers' tests ask of a model's tester: its sizes, a config and inputs."""

    batch_size, seq_length, encoder_seq_length, key_length = BATCH, LENGTH, LENGTH, LENGTH
    is_training, num_choices, num_labels, vocab_size = True, 4, 3, VOCABULARY
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, parent: unittest.TestCase, model_type: str, sizes: dict[str, Any]) -> None:
        self.parent, self.model_type, self.sizes = parent, model_type, sizes
        self.num_hidden_layers = self.get_config().num_hidden_layers
        if model_type == "vit":
            self.seq_length = self.encoder_seq_length = self.key_length = 37
            self.mask_length, self.num_masks = 36, 5

    def get_config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **SIZES | self.sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(0)
        if self.model_type == "vit":
            return self.get_config(), {"pixel_values": torch.rand(BATCH, 3, 24, 24, generator=drawn)}
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=drawn)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def case(
    model_type: str, classes: list[str], *, source: Any = transformers, patch: bool = True, **sizes: Any
) -> type[unittest.TestCase]:
    """transformers' tests of one model type."""
    tested = [getattr(source, name) for name in classes if hasattr(source, name)]
    made: Callable[[type[PreTrainedModel]], type[PreTrainedModel]] = patched if patch else lambda cls: cls

    class Case(test_modeling_common.ModelTesterMixin, unittest.TestCase):
        all_model_classes: ClassVar = tuple(made(cls) for cls in tested)
        test_resize_embeddings = model_type != "vit"
        has_attentions = patch

        def setUp(self) -> None:
            self.model_tester = ModelTester(self, model_type, sizes)

    return Case


def with_heads(name: str) -> list[str]:
    """The base class and those of the heads."""
    return [f"{name}Model", *(f"{name}For{head}" for head in HEADS)]


def two_layers(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a decoder of our own tests, of the first two layers, with the tokens of these."""
    tokens = {name: size for name, size in SIZES.items() if name.startswith(("vocab", "pad", "bos", "eos"))}
    small = sizes | tokens | {"num_hidden_layers": 2}
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][:2]
    if "vocab_size_per_layer_input" in small:
        small["vocab_size_per_layer_input"] = VOCABULARY
    return {name: size for name, size in small.items() if name != "initializer_range"}


GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
VIT_SIZES: dict[str, Any] = {"image_size": 24, "patch_size": 4, "pad_token_id": None}
TestBert = case("bert", with_heads("Bert"))
TestRoberta = case("roberta", with_heads("Roberta"))
TestViT = case("vit", ["ViTModel", "ViTForImageClassification"], **VIT_SIZES)
TestGPT2 = case(
    "gpt2", ["GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"], embd_pdrop=0.0, **GPT2_SIZES
)
TestLlama = case("llama", ["LlamaModel", "LlamaForCausalLM"], num_key_value_heads=2)
for _type, _name in {
    "mistral": "Mistral", "phi3": "Phi3", "qwen3": "Qwen3", "gemma3_text": "Gemma3Text", "gemma4_text": "Gemma4Text",
    "glm4": "Glm4", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3",
    "qwen3_next": "Qwen3Next", "granitemoehybrid": "GraniteMoeHybrid", "lfm2": "Lfm2", "gpt_oss": "GptOss",
}.items():  # fmt: skip
    classes = [f"{_name}Model", f"{_name.removesuffix('Text')}ForCausalLM"]
    globals()[f"Test{_name}"] = case(_type, classes, **two_layers(DECODERS[_type]))
TestModernBert = case("modernbert", with_heads("ModernBert"), global_attn_every_n_layers=2)
TestCST = case("cst", with_heads("CST"), source=our_models, patch=False, slice_length=4)
TestClusterFormer = case("clusterformer", with_heads("ClusterFormer"), source=our_models, patch=False, clusters=3)
for _name, _case in list(globals().items()):
    if _name.startswith("Test"):
        _case.__name__ = _case.__qualname__ = _name
