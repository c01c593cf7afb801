"""Running text is cut into the same examples however it is read, and only the text that is used."""

import json
from itertools import chain

import pytest
from datasets import Dataset, DatasetDict

from hf_effattn import training
from hf_effattn.data import text_data
from scripts.train import clm as run_clm
from scripts.train import mlm as run_mlm

RUN = "--use_cpu --report_to none --vocab_size 270 --block_length 8".split()  # noqa: SIM905
MODELS = {
    run_clm: ["--model_type", "gpt2", "--config_overrides", "n_layer=1,n_embd=16,n_head=2"],
    run_mlm: ["--model_type", "bert", "--config_overrides", "num_hidden_layers=1,hidden_size=12"],
}
# Empty, short and long ones, one of them several examples long.
TEXTS = ["", "a cat", " = a title = ", "", "the cat sat on the mat " * 20, "x", *(f"line {n}" for n in range(40)), ""]


@pytest.fixture(scope="module")
def tokenizer():
    return training.train_tokenizer(TEXTS, 270)


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("characters", [1, 3, 100, 1000, text_data.PORTION])
def test_examples_are_those_of_the_whole_text(characters, length, tokenizer):
    """As if it were one list of tokens, with the mark of an end behind each text."""
    texts = DatasetDict({"train": Dataset.from_dict({"number": range(len(TEXTS)), "text": TEXTS})})
    whole = list(chain.from_iterable([*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS))
    expected = [whole[start : start + length] for start in range(0, len(whole) - length + 1, length)]
    examples = text_data.blocks(texts, tokenizer, length, characters)["train"]
    assert examples["input_ids"][:] == expected
    assert examples["labels"][:] == expected
    assert examples.column_names == ["input_ids", "labels"]


def test_little_of_a_text_is_in_memory():
    """As many characters as are asked for, and what is left of the last text."""
    portions = list(text_data.portions(Dataset.from_dict({"text": TEXTS}), 30))
    assert list(chain.from_iterable(portions)) == TEXTS
    assert all(sum(len(text) + 1 for text in portion[:-1]) < 30 for portion in portions)
    assert len(portions) > 10


def test_examples_are_made_once(tokenizer, monkeypatch):
    """A second run takes them from the cache; other lengths and texts are others."""
    texts = DatasetDict({"train": Dataset.from_dict({"text": TEXTS})})
    first = text_data.blocks(texts, tokenizer, 8)["train"]
    others = [
        text_data.blocks(DatasetDict({"train": Dataset.from_dict({"text": TEXTS[1:]})}), tokenizer, 8)["train"],
        text_data.blocks(texts, tokenizer, 9)["train"],
        text_data.blocks(texts, training.train_tokenizer(TEXTS[4:5], 265), 8)["train"],
    ]
    assert all(other.cache_files != first.cache_files for other in others)
    monkeypatch.setattr(Dataset, "iter", None)
    assert text_data.blocks(texts, tokenizer, 8)["train"].cache_files == first.cache_files


def test_a_text_that_is_too_short_is_told(tokenizer):
    texts = DatasetDict({"validation": Dataset.from_dict({"text": ["a"]})})
    with pytest.raises(
        ValueError, match=r"^2 tokens are less than an example: give more text, or less --block_length"
    ):
        text_data.blocks(texts, tokenizer, 8)


@pytest.fixture
def data_set(tmp_path):
    """A data set as the Hub has WikiText: lines, in three splits of a configuration with a name."""
    folder = tmp_path / "wikitext"
    folder.mkdir()
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("test", "validation", "train")]
    for file in files:
        rows = [{"page": n, "text": f"a line of {file['split']} {n}"} for n in range(60)]
        (folder / file["path"]).write_text("\n".join(map(json.dumps, rows)))
    configs = json.dumps([{"config_name": "wikitext-103-raw-v1", "data_files": files}, {"config_name": "other"}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    return ["--dataset_name", str(folder), "--dataset_config_name", "wikitext-103-raw-v1"]


@pytest.mark.parametrize("script", MODELS, ids=lambda script: script.__name__)
def test_only_what_is_used_becomes_tokens(script, data_set, tmp_path, monkeypatch):
    """And so many examples as are asked for are taken."""
    seen = []
    original = script.blocks

    def blocks(texts, *rest):
        seen.append(set(texts))
        return original(texts, *rest)

    monkeypatch.setattr(script, "blocks", blocks)
    common = [*RUN, *MODELS[script], *data_set, "--per_device_train_batch_size", "1", "--max_train_samples", "5"]
    train = ["--do_train", "--num_train_epochs", "1", "--output_dir", str(tmp_path / "run")]
    script.main([*common, *train])
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 5
    named = ["--use_cpu", "--report_to", "none", "--block_length", "8", *data_set]
    alone = [*named, "--model_name_or_path", str(tmp_path / "run"), "--do_eval", "--max_eval_samples", "3"]
    metrics = script.main([*alone, "--per_device_eval_batch_size", "1", "--output_dir", str(tmp_path / "alone")])
    assert metrics["eval_steps_per_second"] / metrics["eval_samples_per_second"] == pytest.approx(1, rel=0.01)
    assert seen == [{"train"}, {"validation"}]
    if script is run_clm:
        assert metrics["validation_tokens"] == 3 * 8
        assert not {"train_tokens", "unigram_loss"} & set(metrics)


def test_counts_are_made_where_they_are_asked_for(data_set, tmp_path):
    common = [
        *RUN,
        *MODELS[run_clm],
        *data_set,
        "--do_train",
        "--max_steps",
        "1",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    without = run_clm.main([*common, "--do_eval"])
    assert without["train_tokens"] > 0
    assert "unigram_loss" not in without
    assert {"unigram_loss", "bigram_loss"} <= set(run_clm.main([*common, "--do_eval", "--ngram_losses"]))
    with pytest.raises(ValueError, match=r"--ngram_losses counts .* pass --do_train and --do_eval"):
        run_clm.main([*common, "--ngram_losses"])
