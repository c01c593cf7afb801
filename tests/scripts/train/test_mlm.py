"""Masked language models: pairs are what they are labelled as, and both kinds of training learn and resume."""

import pytest
from datasets import Dataset
from support.script_runs import whole_and_resumed
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from hf_effattn import training
from scripts.train import mlm as run_mlm

SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,hidden_dropout_prob=0"
MODELS = {
    "bert": SIZES,
    "roberta": SIZES,
    "clusterformer": SIZES + ",clusters=2,attention_probs_dropout_prob=0",
    "cst": SIZES + ",slice_length=4",
}
RUN = "--use_cpu --report_to none --learning_rate 1e-2 --vocab_size 270 --block_length 16 --do_train --do_eval "
RUN += "--mlm_probability 0.3 --per_device_train_batch_size 8"


@pytest.fixture
def arguments(tmp_path):
    """Texts of one word each, again and again: every word that is not masked tells the masked ones."""
    files = []
    for word in ("cat", "dog", "one", "two"):
        (tmp_path / f"{word}.txt").write_text(f"{word} " * 200)
        files.append(str(tmp_path / f"{word}.txt"))
    return [*RUN.split(), "--train_files", *files, "--validation_files", *files]


def test_pairs_are_what_their_labels_say():
    """Numbered words: in a pair that belongs together the second text goes on where the first ends."""
    texts = Dataset.from_dict({"text": [" ".join(f"w{n}" for n in range(first, first + 400)) for first in (0, 1000)]})
    tokenizer = training.train_tokenizer(texts["text"], 3000, pairs=True, masks=True)
    pairs = run_mlm.sentence_pairs(texts, tokenizer, 32, seed=0)
    assert {len(ids) for ids in pairs["input_ids"]} <= {29, 30, 31, 32}  # cut out, a word may be another token
    labels = set()
    for ids, segments, label in zip(
        pairs["input_ids"], pairs["token_type_ids"], pairs["next_sentence_label"], strict=True
    ):
        middle = segments.index(1)
        assert segments == [0] * middle + [1] * (len(ids) - middle)
        assert [place for place, token in enumerate(ids) if token == tokenizer.eos_token_id] == [0, middle - 1]
        text = tokenizer.decode(ids[1 : middle - 1]), tokenizer.decode(ids[middle:])
        whole = " ".join(texts["text"])
        assert (label == run_mlm.FOLLOWS) == ("".join(text) in whole), text
        labels.add(label)
    assert labels == {run_mlm.FOLLOWS, run_mlm.RANDOM}
    share = sum(pairs["next_sentence_label"]) / len(pairs)
    assert 0.3 < share < 0.7
    again = run_mlm.sentence_pairs(texts, tokenizer, 32, seed=0)
    assert again["input_ids"][:] == pairs["input_ids"][:]


def test_lines_are_put_together_to_documents():
    rows = ["a line", "", "another line", "one of many words that is long enough"]
    assert list(run_mlm.documents(rows, 15)) == ["a line\n\nanother line", "one of many words that is long enough"]
    lines = Dataset.from_dict({"text": [f"line {n} of many" for n in range(200)]})
    tokenizer = training.train_tokenizer(lines["text"], 400, pairs=True, masks=True)
    pairs = run_mlm.sentence_pairs(lines, tokenizer, 32, seed=0)
    used = sum(len(ids) - 2 for ids in pairs["input_ids"])
    assert used > 0.7 * sum(len(ids) - 1 for ids in tokenizer(lines["text"][:])["input_ids"])


def test_masks_depend_on_the_texts_and_the_seed_alone():
    tokenizer = training.train_tokenizer(["one two three four"], 300, pairs=True, masks=True)
    texts = [tokenizer(words * 30) for words in ("one two ", "three four ")]

    def labels(seed, *earlier):
        collator = run_mlm.RepeatableMasks(tokenizer, mask_seed=seed)
        for batch in earlier:
            collator(batch)
        return collator(texts[:1])["labels"]

    assert labels(0).equal(labels(0, texts[1:], texts))
    assert not labels(0).equal(labels(1))


def test_evaluation_needs_no_text_to_train_on(arguments, tmp_path):
    model = ["--model_type", "bert", "--config_overrides", MODELS["bert"]]
    run_mlm.main([*arguments, *model, "--max_steps", "1", "--output_dir", str(tmp_path / "run")])
    held_out = arguments[arguments.index("--validation_files") :]
    alone = ["--model_name_or_path", str(tmp_path / "run"), "--use_cpu", "--report_to", "none", "--block_length", "16"]
    metrics = run_mlm.main([*alone, *held_out, "--do_eval", "--output_dir", str(tmp_path / "check")])
    assert metrics["perplexity"] > 1


def test_too_little_text_for_pairs_raises():
    tokenizer = training.train_tokenizer(["abc"], 300, pairs=True, masks=True)
    with pytest.raises(ValueError, match="has 0 pairs of 32 tokens"):
        run_mlm.sentence_pairs(Dataset.from_dict({"text": ["abc"]}), tokenizer, 32, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_run_mlm_learns(model_type, arguments, tmp_path):
    model = ["--model_type", model_type, "--config_overrides", MODELS[model_type]]
    metrics = run_mlm.main([*arguments, *model, "--max_steps", "150", "--output_dir", str(tmp_path / "run")])
    assert metrics["eval_accuracy"] > 0.5
    assert metrics["perplexity"] < 4
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "run")
    assert loaded.config.model_type == model_type
    longest = AutoTokenizer.from_pretrained(tmp_path / "run")("cat " * 99, truncation=True, return_tensors="pt")
    assert longest["input_ids"].shape == (1, 16)
    loaded(**longest)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "clusterformer"])
def test_run_mlm_with_pairs_learns_and_resumes(model_type, arguments, tmp_path):
    common = [*arguments, "--next_sentence", "--model_type", model_type, "--config_overrides", MODELS[model_type]]
    common += "--max_steps 150 --save_steps 75".split()  # noqa: SIM905
    whole, resumed = whole_and_resumed(run_mlm.main, common, tmp_path, step=75)
    assert whole["eval_accuracy"] > 0.4  # of one word in four
    assert 0 < whole["eval_next_sentence_accuracy"] <= 1
    assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-6)
    assert AutoModelForPreTraining.from_pretrained(tmp_path / "whole").config.model_type == model_type
