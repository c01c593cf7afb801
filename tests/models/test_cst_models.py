"""The models of the Composite Slice Transformer in transformers: heads, training, saving, Auto classes, configs."""

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_models import LENGTH, tiny_config, tiny_model, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from hf_effattn.models import (
    CSTConfig,
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForSequenceClassification,
    CSTModel,
)


@pytest.mark.parametrize("variant", ["paper", "global_tokens", "mlp", "full"])
@pytest.mark.parametrize("model_class", [CSTModel, CSTForCausalLM], ids=["bidirectional", "causal"])
def test_nothing_is_dropped_in_evaluation(variant, model_class):
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    with_dropout, without = tiny_model(model_class, variant, **dropout), tiny_model(model_class, variant)
    assert torch.equal(with_dropout(tokens())[0], without(tokens())[0])


def test_weights_begin_as_everywhere_in_transformers():
    model = CSTForMaskedLM(CSTConfig(hidden_size=256, num_hidden_layers=1, vocab_size=500, slice_length=16))
    linear, norm = model.cst.layers[0].feed_forward.inner, model.cst.layers[0].attention_norm
    tables = torch.cat(list(model.cst.positions().values()))
    assert abs(linear.weight.std().item() - 0.02) < 2e-4
    assert abs(tables.std().item() - 0.02) < 5e-4
    assert (linear.bias == 0).all()
    assert (norm.weight == 1).all()
    assert (model.get_input_embeddings().weight[0] == 0).all()


def test_word_embeddings_may_start_from_other_numbers(tmp_path):
    """As large as in the published code of Long Range Arena, padding and all else as ever; loading changes nothing."""
    options = {"vocab_size": 400, "hidden_size": 64, "initializer_range": 0.02, "num_labels": 3}
    config = tiny_config(**options, embedding_initializer_range=1.0)
    torch.manual_seed(0)
    model = CSTForSequenceClassification(config)
    words = model.get_input_embeddings().weight
    assert abs(words[1:].std().item() - 1) < 0.02
    assert torch.equal(words[config.pad_token_id], torch.zeros(64))
    others = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(module.weight.std() < 0.03 for module in others)
    model.save_pretrained(tmp_path)
    loaded = CSTForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, words)
    small = CSTForSequenceClassification(tiny_config(**options)).get_input_embeddings().weight
    assert abs(small[1:].std().item() - 0.02) < 5e-4
    with pytest.raises(ValueError, match="embedding_initializer_range must be above 0"):
        tiny_config(embedding_initializer_range=0.0)


def test_ms_vipe_stores_fewer_positions_than_the_length():
    paper, absolute = (tiny_model(CSTModel, variant) for variant in ("paper", "absolute_positions"))
    assert sum(table.numel() for table in paper.positions().values()) == (4 + 64 // 4) * 16
    assert absolute.embeddings.position_embeddings.weight.numel() == 64 * 16


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_other_problems_of_sequence_classification(problem):
    model = tiny_model(CSTForSequenceClassification, num_labels=1 if problem == "regression" else 3)
    model.config.problem_type = problem
    labels = torch.rand(2, dtype=torch.float64) if problem == "regression" else torch.ones(2, 3, dtype=torch.float64)
    output = model(tokens(), labels=labels)
    expected = (
        torch.nn.functional.mse_loss(output.logits.squeeze(), labels)
        if problem == "regression"
        else torch.nn.functional.binary_cross_entropy_with_logits(output.logits, labels)
    )
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=1e-15)


def test_a_pair_is_two_towers():
    """Each text is read alone: its mean is that of the model by itself."""
    model = tiny_model(CSTForPairClassification, num_labels=2)
    first, second = tokens(2, 9), tokens(2, 14, seed=4)
    means = [model.cst(ids)[0].mean(dim=1) for ids in (first, second)]
    features = torch.cat([*means, means[0] * means[1], means[0] - means[1]], dim=-1)
    logits, labels = model.classifier(features), torch.tensor([1, 0])
    torch.testing.assert_close(model(first, second).logits, logits, rtol=0, atol=1e-15)
    loss, *_ = model(first, second, labels=labels, return_dict=False)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels), rtol=0, atol=1e-15)


def test_names_that_transformers_asks_for():
    """Its pipelines log an error about a class whose name they do not know."""
    from transformers.models.auto import modeling_auto

    for kind, task in (
        ("CAUSAL_LM", "CausalLM"),
        ("SEQUENCE_CLASSIFICATION", "SequenceClassification"),
        ("TOKEN_CLASSIFICATION", "TokenClassification"),
    ):
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        assert [names[family.lower()] for family in ("CST", "ClusterFormer")] == [
            f"CSTFor{task}",
            f"ClusterFormerFor{task}",
        ]
    assert AutoModelForCausalLM._model_mapping[CSTConfig] is CSTForCausalLM


def test_a_text_is_classified_by_its_mean():
    model = tiny_model(CSTForSequenceClassification, num_labels=2)
    output = model(tokens(), output_hidden_states=True)
    torch.testing.assert_close(
        output.logits, model.classifier(output.hidden_states[-1].mean(dim=1)), rtol=0, atol=1e-15
    )
    with pytest.raises(ValueError, match="no single attention matrix"):
        model(tokens(), output_attentions=True)


@pytest.mark.slow_except("a_cpu-paper-torch.bfloat16", "a_gpu-*-torch.bfloat16", "a_gpu-paper-torch.float16")
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp", "linear_pooling"])
def test_autocast_is_close_to_full_precision(variant, dtype):
    model = tiny_model(CSTForSequenceClassification, variant, num_labels=3, initializer_range=0.1).float()
    ids, mask = tokens(4), torch.ones(4, LENGTH, dtype=torch.long)
    mask[-1, 15:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(4) % 3}
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    output.loss.backward()
    exact = model.double()(**inputs).logits
    assert_close_to_reference("logits", output.logits.double(), exact, rtol=4 * torch.finfo(dtype).eps)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_tokenizers_of_bert_and_gpt2_are_usable(real_model_folder, tmp_path):
    """A BERT tokenizer saved beside the model comes back through AutoTokenizer; so does one of GPT-2's kind."""
    from transformers import GPT2TokenizerFast

    bert = AutoTokenizer.from_pretrained(real_model_folder)
    symbols = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "he", "<|endoftext|>"]
    gpt2 = GPT2TokenizerFast(vocab={s: i for i, s in enumerate(symbols)}, merges=[("h", "e")])
    gpt2.pad_token = gpt2.eos_token
    for name, tokenizer in (("bert", bert), ("gpt2", gpt2)):
        config = tiny_config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
        model = CSTModel(config).eval()
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        loaded = AutoTokenizer.from_pretrained(tmp_path / name)
        batch = loaded(["the cat", "he hid"], padding=True, return_tensors="pt")
        assert batch["input_ids"].tolist() == tokenizer(["the cat", "he hid"], padding=True)["input_ids"]
        assert model(**batch)[0].shape == (*batch["input_ids"].shape, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": -1}, ValueError, "vocab_size must be at least 1, got -1"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, ValueError, "max_position_embeddings must be at least 1, got 0"),
        ({"hidden_size": 15}, ValueError, "hidden_size 15 must be a multiple of num_attention_heads 2"),
        ({"slice_length": 0}, ValueError, "slice_length must be at least 1"),
        ({"slice_length": 2.5}, TypeError, "slice_length must be an int"),
        ({"slice_length": ()}, ValueError, "slice_length is empty"),
        ({"slice_length": (8, 12)}, ValueError, r"each a multiple of the one before; 12 is none of 8"),
        ({"slice_length": (8, 8)}, ValueError, "must rise"),
        ({"extension_ratio": 4}, ValueError, r"extension_ratio must lie in \[1, 3\]"),
        ({"slice_length": 3, "extension_ratio": 2}, ValueError, "takes 1.5 tokens of each neighbour"),
        ({"composition": "both"}, ValueError, "composition must be one of 'local-global', 'parallel', 'global-local'"),
        ({"pooling": "sum"}, ValueError, "pooling must be one of"),
        ({"local_mixing": "conv"}, ValueError, "local_mixing must be one of"),
        ({"position_embedding": "rotary"}, ValueError, "position_embedding must be one of"),
        ({"num_global_tokens": -1}, ValueError, "num_global_tokens must be at least 0"),
        ({"local_mixing": "mlp", "extension_ratio": 2}, ValueError, "takes neither an extension_ratio"),
        ({"local_mixing": "mlp", "num_global_tokens": 1}, ValueError, "nor global tokens"),
        ({"composition": "full", "local_mixing": "mlp"}, ValueError, "has no slices and one attention"),
        ({"composition": "full", "num_global_tokens": 1}, ValueError, "has no slices and one attention"),
        ({"composition": "full", "share_projections": False}, ValueError, "has no slices and one attention"),
    ],
)
def test_mistakes_in_a_config_raise(changes, error, message):
    with pytest.raises(error, match=message):
        tiny_config(**changes)


def test_mistakes_in_a_call_raise():
    model = tiny_model(CSTModel)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, N\) = \(2, 21\)"):
        model(tokens(), attention_mask=torch.ones(2, 1, 21, 21))
    with pytest.raises(ValueError, match="CSTForMaskedLM sees both sides"):
        CSTForMaskedLM(tiny_config(is_decoder=True))
