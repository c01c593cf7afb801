"""The training scripts learn, resume to the same result, and say what is wrong with their arguments."""

import json
import math

import datasets
import pytest
import torch
from support.script_runs import whole_and_resumed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

from hf_effattn import from_pretrained, training
from hf_effattn.data import text_data
from scripts.train import classification as run_classification
from scripts.train import clm as run_clm

SMALL = {
    "bert": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,max_position_embeddings=32",
    "cst": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,slice_length=4,max_position_embeddings=32",
    "clusterformer": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,clusters=2,max_position_embeddings=32",
}
RUN = "--use_cpu --report_to none --per_device_train_batch_size 16 --learning_rate 1e-2".split()  # noqa: SIM905


def test_run_clm_learns_and_resumes(tmp_path):
    """From scratch on one text; a run that is stopped and resumed ends as one that was not."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 300)
    sizes = "n_layer=1,n_embd=16,n_head=2,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    common = f"--vocab_size 270 --block_length 16 --model_type gpt2 --config_overrides {sizes}".split()
    common += "--do_train --do_eval --use_cpu".split()  # noqa: SIM905
    common += ["--train_files", str(tmp_path / "text.txt"), "--validation_files", str(tmp_path / "text.txt")]
    common += "--max_steps 30 --learning_rate 1e-2 --save_steps 20 --report_to none".split()  # noqa: SIM905
    common += ["--save_dtype", "bfloat16", "--ngram_losses"]
    whole, resumed = whole_and_resumed(run_clm.main, common, tmp_path, step=20)
    assert whole["eval_loss"] < whole["unigram_loss"]
    assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-6)
    # In two bytes a number; the checkpoints keep four.
    sizes = [(tmp_path / "stopped" / name / "model.safetensors").stat().st_size for name in ("", "checkpoint-30")]
    assert sizes[0] < 0.6 * sizes[1]


def test_ngram_losses_by_hand():
    """Two tokens that alternate: the bigram knows what follows, the unigram half of it."""
    rows = datasets.Dataset.from_dict({"input_ids": [[0, 1] * 500]})
    losses = run_clm.ngram_losses(rows, rows, vocab_size=2)
    assert losses["unigram_loss"] == pytest.approx(math.log(2))
    assert losses["bigram_loss"] < 0.01


def test_run_clm_strips_what_gutenberg_adds(tmp_path):
    text = "Title\n*** START OF THE PROJECT ***\nOnce upon a time.\n*** END OF THE PROJECT ***\nLicence"
    (tmp_path / "book.txt").write_text(text)
    arguments = text_data.DataArguments(train_files=[str(tmp_path / "book.txt")])
    assert text_data.load_texts(arguments)["train"]["text"] == ["Once upon a time."]
    with pytest.raises(ValueError, match="no text: name a data set"):
        text_data.load_texts(text_data.DataArguments())
    arguments.dataset_name = "some/name"
    with pytest.raises(ValueError, match="--dataset_name and --train_files name data in more than one way"):
        text_data.load_texts(arguments)


@pytest.fixture
def class_files(tmp_path):
    """Two classes that differ in one word; an empty line."""
    for number, (name, word) in enumerate((("good.txt", "fine"), ("bad.txt", "poor"))):
        lines = [f"a {word} story of {place} things" for place in range(40 + number)]
        (tmp_path / name).write_text("\n".join([*lines, "", ""]))
    return [str(tmp_path / "good.txt"), str(tmp_path / "bad.txt")]


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("model_type", SMALL)
def test_run_classification_from_scratch(model_type, class_files, tmp_path):
    metrics = run_classification.main(
        [
            *(*RUN, "--class_files", *class_files, "--vocab_size", "300", "--max_length", "32"),
            *("--model_type", model_type, "--config_overrides", SMALL[model_type], "--do_train", "--do_eval"),
            *("--num_train_epochs", "12", "--logging_steps", "10", "--output_dir", str(tmp_path / "run")),
        ]
    )
    assert metrics["eval_accuracy"] == 1.0
    assert json.loads((tmp_path / "run" / "all_results.json").read_text())["eval_accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert (model.config.model_type, model.config.num_labels) == (model_type, 2)
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert ("largest_cluster" in log[0]) == (model_type == "clusterformer")


def test_tensorboard_gets_the_losses_and_what_the_clusters_do(class_files, tmp_path):
    metrics = run_classification.main(
        [
            *("--class_files", *class_files, "--vocab_size", "300", "--max_length", "32", "--do_train", "--do_eval"),
            *("--model_type", "clusterformer", "--config_overrides", SMALL["clusterformer"], "--use_cpu"),
            *("--report_to", "tensorboard", "--logging_steps", "2", "--max_steps", "6"),
            *("--output_dir", str(tmp_path / "run")),
        ]
    )
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss", "largest_cluster", "empty_clusters", "cluster_loss", "sorting_loss"):
        seen = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert seen == pytest.approx({row["step"]: row[name] for row in log if "loss" in row}, abs=1e-6)
        assert list(seen) == [2, 4, 6]
    assert events.Scalars("eval/loss")[-1].value == pytest.approx(metrics["eval_loss"], abs=1e-6)


def test_smoothed_labels_would_lose_the_losses_of_clusters(class_files, tmp_path):
    common = [*RUN, "--class_files", *class_files, "--vocab_size", "300", "--max_length", "32", "--do_train"]
    common += ["--label_smoothing_factor", "0.1", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    run_classification.main([*common, "--model_type", "cst", "--config_overrides", SMALL["cst"]])
    with pytest.raises(ValueError, match="leave out the losses of the clusters"):
        run_classification.main(
            [*common, "--model_type", "clusterformer", "--config_overrides", SMALL["clusterformer"]]
        )


def test_tab_separated_files_keep_quotation_marks(tmp_path):
    """As GLUE has them; a quotation mark that opens nothing must not swallow the lines after it."""
    (tmp_path / "train.tsv").write_text('sentence\tlabel\nan " odd one\t0\ntwo "\t1\n')
    data = run_classification.load_texts(
        run_classification.DataArguments(train_files=[str(tmp_path / "train.tsv")], validation_share=0)
    )
    assert data["train"]["sentence"][:] == ['an " odd one', 'two "']
    assert data["train"]["label"][:] == [0, 1]


@pytest.mark.slow
def test_run_classification_of_pairs_with_a_method_resumes(tmp_path):
    """Bytes of JSON lines: whether two words are the same; a run that is stopped ends as one that was not."""
    words = ["ab", "cd", "ef", "gh"]
    rows = [{"one": a, "two": b, "same": "yes" if a == b else "no"} for a in words for b in [*words, a, a]] * 3
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = [*RUN, "--train_files", str(tmp_path / "pairs.jsonl"), "--test_files", str(tmp_path / "pairs.jsonl")]
    common += "--text_column one --text_pair_column two --label_column same --max_length 32".split()  # noqa: SIM905
    common += ["--tokenizer_name", "bytes", "--model_type", "bert"]
    common += ["--config_overrides", SMALL["bert"] + ",hidden_dropout_prob=0"]
    common += ["--method", "bi-clustered clusters=2 topk=2 key_clusters=4 min_length=0"]
    common += "--do_train --do_predict --max_steps 20 --save_steps 10".split()  # noqa: SIM905
    whole, resumed = whole_and_resumed(run_classification.main, common, tmp_path, step=10)
    assert resumed["test_loss"] == pytest.approx(whole["test_loss"], abs=1e-6)
    model = from_pretrained(AutoModelForSequenceClassification, tmp_path / "whole")
    assert model.config._attn_implementation == "bi-clustered"
    arguments = training.ModelArguments(model_name_or_path=str(tmp_path / "whole"))
    again = training.make_model(arguments, AutoModelForSequenceClassification, tokenizer=None, defaults={})
    assert again.config._attn_implementation == "bi-clustered"


def test_pairs_are_marked_in_every_tokenizer_that_is_trained(tmp_path):
    """Two texts, one after the other, would be one text."""
    tokenizer = training.train_tokenizer(["the cat sat"] * 9, 300, pairs=True)
    tokenizer.save_pretrained(tmp_path)
    for known in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        both = known("the cat", "sat the")
        end = known.eos_token_id
        middle = both["input_ids"].index(end, 1)
        assert both["input_ids"][0] == end
        assert both["token_type_ids"] == [0] * (middle + 1) + [1] * (len(both["input_ids"]) - middle - 1)
    alone = training.train_tokenizer(["the cat sat"] * 9, 300)
    assert alone.decode(alone("the cat")["input_ids"]) == "the cat"
    assert "token_type_ids" not in alone("the cat")


def test_a_finished_run_is_not_trained_any_further(class_files, tmp_path):
    """In the middle of an epoch, with a learning rate that does not end at 0: a step more would show."""
    common = [*RUN, "--class_files", *class_files, "--vocab_size", "300", "--max_length", "32", "--do_train"]
    common += ["--model_type", "bert", "--config_overrides", SMALL["bert"], "--lr_scheduler_type", "constant"]
    common += ["--do_eval", "--max_steps", "3", "--save_steps", "3", "--output_dir", str(tmp_path / "run")]
    first = run_classification.main([*common, "--resume_from_checkpoint", "last"])
    second = run_classification.main([*common, "--resume_from_checkpoint", "last"])
    assert second["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-6)
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 3
    longer = run_classification.main([*common, "--resume_from_checkpoint", "last", "--max_steps", "5"])
    assert longer["eval_loss"] != pytest.approx(first["eval_loss"], abs=1e-6)
    with pytest.raises(ValueError, match="has had 5 steps, more than the 3 asked for"):
        run_classification.main([*common, "--resume_from_checkpoint", "last"])


def test_texts_end_with_the_mark_of_their_tokenizer(real_model_folder):
    """Not with the words of another one's mark."""
    texts = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a line", "two"]})})
    bert = AutoTokenizer.from_pretrained(real_model_folder)
    ids = text_data.blocks(texts, bert, 5)["train"]["input_ids"][0]
    assert bert.convert_ids_to_tokens(ids) == ["a", "line", "[SEP]", "two", "[SEP]"]
    trained = training.train_tokenizer(["a line", "two"] * 9, 270)
    whole = trained("a line")["input_ids"]
    ids = text_data.blocks(texts, trained, len(whole) + 1)["train"]["input_ids"][0]
    assert ids == [*whole, trained.eos_token_id]
    assert run_clm.tokens_per_word(texts["train"], bert) == pytest.approx(5 / 3)


def test_perplexity_is_of_the_task_alone():
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "clusters": 2}
    weights = {"cluster_loss_weight": 0.01, "sorting_loss_weight": 0.01}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("clusterformer", **sizes, **weights)).eval()
    words = torch.arange(1, 11)[None]
    whole = model(words, labels=words)
    with training.task_loss_alone(model):
        alone = model(words, labels=words)
    assert alone.loss.item() == pytest.approx(whole.task_loss.item(), abs=1e-6)
    assert whole.loss.item() != pytest.approx(whole.task_loss.item(), abs=1e-6)
    assert model(words, labels=words).loss.item() == pytest.approx(whole.loss.item(), abs=1e-6)


def test_a_fresh_run_has_its_own_tokenizer(tmp_path):
    """Only a run that is resumed takes the vocabulary of what lies in its folder."""
    training.train_tokenizer(["abc"], 260).save_pretrained(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    arguments = training.ModelArguments(vocab_size=300)
    for resume, size in (("last", 260), (None, 280)):
        run = TrainingArguments(str(tmp_path), resume_from_checkpoint=resume, report_to=[], use_cpu=True)
        assert (len(training.load_tokenizer(arguments, run, ["the cat sat on the mat"] * 9)) < 262) == (size == 260)


def test_a_tenth_of_the_training_texts_is_held_out(class_files):
    data = run_classification.load_texts(run_classification.DataArguments(class_files=class_files))
    assert (len(data["train"]), len(data["validation"])) == (72, 9)
    assert not {row["text"] for row in data["train"]} & {row["text"] for row in data["validation"]}
    again = run_classification.load_texts(run_classification.DataArguments(class_files=class_files))
    assert data["validation"]["text"] == again["validation"]["text"]


def test_settings_from_a_command_line():
    assert training.parse_settings("a=1,b=x, c=True,d=1e-3") == {"a": 1, "b": "x", "c": True, "d": 1e-3}
    assert training.parse_settings('{"slice_length": [8, 64]}') == {"slice_length": [8, 64]}
    assert training.parse_settings("") == {}
    with pytest.raises(ValueError, match="name=value"):
        training.parse_settings("clusters")


def test_a_model_has_the_settings_that_it_is_given():
    tokenizer = training.train_tokenizer(["some text"], 270)
    arguments = training.ModelArguments(model_type="bert", config_overrides="layers=3")
    with pytest.raises(ValueError, match="has no setting 'layers'"):
        training.make_model(arguments, AutoModelForSequenceClassification, tokenizer, {"num_labels": 2})


def test_a_model_from_scratch_is_evaluated_without_a_training_split(tmp_path):
    """Its tokenizer is made of the texts that there are."""
    rows = (json.dumps({"text": text, "label": label}) for label in "ab" for text in ("a cat", "the dog"))
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    command = f"--validation_files {tmp_path / 'test.jsonl'} --model_type bert --config_overrides {SMALL['bert']}"
    command += f" --max_length 32 --do_eval --use_cpu --output_dir {tmp_path}"
    metrics = run_classification.main(command.split())
    assert 0 <= metrics["eval_accuracy"] <= 1


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("bert", {"max_position_embeddings": 40}),
        ("gpt2", {"n_positions": 40}),
        # Its positions begin behind the number of the padding.
        ("roberta", {"max_position_embeddings": 41}),
        ("mamba", {}),
        (None, {}),
    ],
)
def test_models_from_scratch_take_texts_of_the_length_asked_for(model_type, expected):
    tokenizer = training.train_tokenizer(["some text"], 260)
    assert tokenizer.pad_token_id == 0
    assert training.length_settings(training.ModelArguments(model_type=model_type), tokenizer, 40) == expected
    checkpoint = training.ModelArguments(model_name_or_path="somewhere", model_type=model_type)
    assert training.length_settings(checkpoint, tokenizer, 40) == {}


def test_no_texts():
    with pytest.raises(ValueError, match="no texts: name a data set"):
        run_classification.load_texts(run_classification.DataArguments())


def test_accuracy_has_the_keys_of_the_hub():
    metric = training.load_metric("accuracy")
    assert metric.compute(predictions=[1, 0, 1], references=[1, 1, 1]) == {"accuracy": pytest.approx(2 / 3)}


def test_texts_longer_than_a_checkpoints_positions_are_refused_with_what_to_do(class_files, tmp_path):
    config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.max_position_embeddings = 32
    BertForSequenceClassification(config).save_pretrained(tmp_path / "short")
    named = ["--model_name_or_path", str(tmp_path / "short"), "--tokenizer_name", "bytes", "--method", "cst"]
    with pytest.raises(ValueError, match=r"short has positions for 32 tokens: .*effattn convert"):
        run_classification.main(
            [
                *(*RUN, "--class_files", *class_files, "--max_length", "64", *named),
                *("--do_train", "--output_dir", str(tmp_path / "run")),
            ]
        )
