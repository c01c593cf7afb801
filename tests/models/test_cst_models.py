"""The models of the Composite Slice Transformer in transformers: heads, training, saving, Auto classes, configs."""

from statistics import median

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_models import LENGTH, VARIANTS, tiny_config, tiny_model, tokens
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

from hf_effattn.models import (
    CSTConfig,
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForQuestionAnswering,
    CSTForSequenceClassification,
    CSTForTokenClassification,
    CSTModel,
)

AUTO_CLASSES = {
    CSTModel: AutoModel,
    CSTForMaskedLM: AutoModelForMaskedLM,
    CSTForCausalLM: AutoModelForCausalLM,
    CSTForSequenceClassification: AutoModelForSequenceClassification,
    CSTForTokenClassification: AutoModelForTokenClassification,
    CSTForQuestionAnswering: AutoModelForQuestionAnswering,
}
HEADS = [model_class for model_class in AUTO_CLASSES if model_class is not CSTModel] + [CSTForPairClassification]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_head = pytest.mark.parametrize("model_class", HEADS, ids=lambda model_class: model_class.__name__)
every_auto_class = pytest.mark.parametrize("model_class", AUTO_CLASSES, ids=lambda model_class: model_class.__name__)


def inputs_for(model_class, B=4):
    """A padded batch with labels for any head."""
    ids, mask = tokens(B), torch.ones(B, LENGTH, dtype=torch.long)
    mask[-1, 15:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model_class in (CSTForMaskedLM, CSTForCausalLM):
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    elif model_class is CSTForTokenClassification:
        inputs["labels"] = (ids % 3).masked_fill(mask == 0, -100)
    elif model_class is CSTForQuestionAnswering:
        inputs |= {"start_positions": ids[:, 0] % 9, "end_positions": ids[:, 1] % 9 + 5}
    else:
        inputs["labels"] = torch.arange(B) % 3
    if model_class is CSTForPairClassification:
        inputs |= {"pair_input_ids": tokens(B, 13, seed=5), "pair_attention_mask": torch.ones(B, 13)}
    return inputs


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def losses(model, inputs, steps, rate=0.01):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    seen = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.slow_except("CSTForSequenceClassification", "CSTForCausalLM")
@every_head
def test_every_head_trains(model_class):
    model = tiny_model(model_class, num_labels=3, initializer_range=0.02).float()
    # At twice the rate Adam may leap once a batch is learned, where the rounding of a processor decides.
    seen = losses(model, inputs_for(model_class), 60, rate=0.005)
    assert seen[-1] < 0.5 * seen[0]


@pytest.mark.slow_except("classifier-paper", "classifier-three_levels", "classifier-mlp", "causal-paper")
@every_variant
@pytest.mark.parametrize("model_class", [CSTForSequenceClassification, CSTForCausalLM], ids=["classifier", "causal"])
def test_every_variant_trains(variant, model_class):
    """A batch is learned by heart, with dropout."""
    dropout = {"hidden_dropout_prob": 0.05, "attention_probs_dropout_prob": 0.05}
    model = tiny_model(model_class, variant, num_labels=3, initializer_range=0.02, **dropout).float()
    torch.manual_seed(1)
    seen = losses(model, inputs_for(model_class), 60)
    assert median(seen[-10:]) < 0.6 * seen[0]  # single steps may leap


@every_variant
@pytest.mark.parametrize("model_class", [CSTForSequenceClassification, CSTForCausalLM], ids=["classifier", "causal"])
def test_every_parameter_gets_a_gradient(variant, model_class):
    """Nothing unused, which would stop distributed training."""
    model = tiny_model(model_class, variant, num_labels=3)
    missing = [name for name, grad in gradients(model, inputs_for(model_class)).items() if grad is None]
    assert missing == []


@pytest.mark.parametrize("variant", ["paper", "global_tokens", "mlp", "full"])
@pytest.mark.parametrize("model_class", [CSTModel, CSTForCausalLM], ids=["bidirectional", "causal"])
def test_nothing_is_dropped_in_evaluation(variant, model_class):
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    with_dropout, without = tiny_model(model_class, variant, **dropout), tiny_model(model_class, variant)
    assert torch.equal(with_dropout(tokens())[0], without(tokens())[0])


@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp", "linear_pooling", "max_pooling"])
@pytest.mark.parametrize("model_class", [CSTForSequenceClassification, CSTForCausalLM], ids=["classifier", "causal"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(variant, model_class, reentrant):
    """Reentrant, it once failed: the positions came in a dict."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = tiny_model(model_class, variant, num_labels=3, **dropout).train()
    torch.manual_seed(0)
    plain = gradients(model, inputs_for(model_class))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    torch.manual_seed(0)
    for name, grad in gradients(model, inputs_for(model_class)).items():
        # Reentrant, the gradients of a shared weight are added in another order.
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=2e-15 if reentrant else 0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp", "linear_pooling"])
@pytest.mark.parametrize("model_class", [CSTForSequenceClassification, CSTForCausalLM], ids=["classifier", "causal"])
def test_compiles_as_one_graph(variant, model_class):
    model = tiny_model(model_class, variant, num_labels=3, use_cache=False)
    inputs = inputs_for(model_class)
    expected, plain = model(**inputs), gradients(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    output = compiled(**inputs)
    assert_close_to_reference("logits", output.logits.detach(), expected.logits.detach(), rtol=1e-14)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert_close_to_reference(name, parameter.grad, plain[name], rtol=1e-12)


@every_auto_class
def test_saved_and_loaded_by_the_auto_class(model_class, tmp_path):
    model = tiny_model(model_class, "three_levels", num_labels=3)
    model.save_pretrained(tmp_path)
    loaded = AUTO_CLASSES[model_class].from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is model_class
    assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    first, second = (m.eval()(tokens()).to_tuple()[0] for m in (model, loaded))
    assert_close_to_reference("output", second.detach(), first.detach(), rtol=1e-14)
    assert type(AUTO_CLASSES[model_class].from_config(model.config)) is model_class


@every_variant
def test_a_config_survives_json(variant, tmp_path):
    config = tiny_config(variant)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is CSTConfig
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert loaded.level_lengths == config.level_lengths


def test_a_backbone_loads_from_and_into_a_head(tmp_path):
    model = tiny_model(CSTForMaskedLM)
    model.save_pretrained(tmp_path)
    backbone, info = AutoModel.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    expected = model.cst(tokens())[0].detach()
    assert_close_to_reference("backbone", backbone.eval()(tokens())[0].detach(), expected, rtol=1e-14)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert all(name.startswith("classifier.") for name in info["missing_keys"])
    assert_close_to_reference("classifier", classifier.eval().cst(tokens())[0].detach(), expected, rtol=1e-14)


def test_a_causal_model_stays_causal_when_loaded_without_its_head(tmp_path):
    config = tiny_config()
    model = CSTForCausalLM(config)
    assert model.config.is_decoder
    assert not config.is_decoder
    model.save_pretrained(tmp_path)
    loaded, expected = AutoModel.from_pretrained(tmp_path).double().eval(), model.double().eval().cst(tokens())[0]
    assert_close_to_reference("output", loaded(tokens())[0].detach(), expected.detach(), rtol=1e-14)


@pytest.mark.parametrize("model_class", [CSTForMaskedLM, CSTForCausalLM])
def test_word_embeddings_are_tied_to_the_head(model_class, tmp_path):
    model = tiny_model(model_class)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(60)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model(tokens()).logits.shape[-1] == 60
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    loose = tiny_model(model_class, tie_word_embeddings=False)
    assert loose.get_output_embeddings().weight is not loose.get_input_embeddings().weight


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
    torch.testing.assert_close(model(first, second).logits, model.classifier(features), rtol=0, atol=1e-15)


@every_head
def test_a_config_may_ask_for_tuples(model_class):
    expected, model = (tiny_model(model_class, num_labels=3, **changes) for changes in ({}, {"return_dict": False}))
    output = model(**inputs_for(model_class))
    assert isinstance(output, tuple)
    assert torch.equal(output[0], expected(**inputs_for(model_class)).loss)


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


def test_hidden_states_and_tuples():
    model = tiny_model(CSTForSequenceClassification, num_labels=2)
    output = model(tokens(), output_hidden_states=True)
    assert len(output.hidden_states) == 3
    torch.testing.assert_close(
        output.logits, model.classifier(output.hidden_states[-1].mean(dim=1)), rtol=0, atol=1e-15
    )
    assert torch.equal(model(tokens(), return_dict=False)[0], output.logits)
    model.config.return_dict = False
    assert torch.equal(model(tokens())[0], output.logits)
    with pytest.raises(ValueError, match="no single attention matrix"):
        model(tokens(), output_attentions=True)


@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp", "linear_pooling"])
def test_autocast_is_close_to_full_precision(variant, dtype):
    model = tiny_model(CSTForSequenceClassification, variant, num_labels=3, initializer_range=0.1).float()
    inputs = inputs_for(CSTForSequenceClassification)
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    output.loss.backward()
    exact = model.double()(**inputs).logits
    assert_close_to_reference("logits", output.logits.double(), exact, rtol=4 * torch.finfo(dtype).eps)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_trainer_trains_it(tmp_path):
    torch.manual_seed(0)
    model = CSTForSequenceClassification(tiny_config(num_labels=2, initializer_range=0.02))
    rows = [{"input_ids": [1 + 2 * (i % 2)] * 6 + [5] * (i % 4), "labels": i % 2} for i in range(32)]

    def collate(batch):
        length = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in batch])
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([r["labels"] for r in batch]),
        }

    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=10, per_device_train_batch_size=8, learning_rate=0.01, report_to=[],
        save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.1 * before


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


def test_padding_is_0_in_every_state():
    model = tiny_model(CSTModel)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3], mask[1, -5:] = 0, 0
    output = model(tokens(), attention_mask=mask, output_hidden_states=True)
    for states in (*output.hidden_states, output.last_hidden_state):
        assert (states[mask == 0] == 0).all()
        assert (states[mask == 1] != 0).any(dim=-1).all()
