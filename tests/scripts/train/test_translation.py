"""BLEU is sacrebleu's, parallel files must agree, and `train/translation.py` translates what it is trained on."""

import gzip
import json
import math
import random

import pytest
import sacrebleu
from support.script_runs import whole_and_resumed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer

from hf_effattn import training
from hf_effattn.data import translation_data
from scripts.train import translation as run_translation

WORDS = dict(
    zip(
        "hund katze haus rot klein sieht und der ein baum mann geht".split(),  # noqa: SIM905
        "dog cat house red small sees and the a tree man walks".split(),  # noqa: SIM905
        strict=True,
    )
)
CLUSTERFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "clusters": 2,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
SMALL = {
    "clusterformer": CLUSTERFORMER,
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "marian": {"d_model": 16, "max_position_embeddings": 32}
    | {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    | {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    | {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
}


def bleu(predictions, references, **options):
    return training.load_metric("sacrebleu").compute(predictions=predictions, references=references, **options)


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({}, {}),
        ({"lowercase": True, "tokenize": "char"}, {"lowercase": True, "tokenize": "char"}),
        ({"smooth_method": "floor", "smooth_value": 0.5}, {"smooth_method": "floor", "smooth_value": 0.5}),
        ({"use_effective_order": True, "force": True}, {"use_effective_order": True, "force": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 3])
def test_bleu_is_that_of_sacrebleu(options, kwargs, count):
    draw = random.Random(0)
    several = [[" ".join(draw.choices(["A", "cat", "sat", "."], k=7)) for _ in range(20)] for _ in range(count + 1)]
    predictions, *references = several
    expected = sacrebleu.corpus_bleu(predictions, references, **kwargs)
    scores = bleu(predictions, list(zip(*references, strict=True)), **options)
    assert scores == {name: getattr(expected, name) for name in scores} | {"score": pytest.approx(expected.score)}
    assert list(scores) == ["score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len"]
    if count == 1:
        assert bleu(predictions, references[0], **options) == scores


def test_bleu_needs_as_many_references_to_every_text():
    with pytest.raises(ValueError, match=r"same number of references, got \[1, 2\]"):
        bleu(["a", "b"], [["a"], ["a", "b"]])


def test_parallel_files_are_read_line_by_line(tmp_path):
    """Gzip or not, several after one another; a line separator of Unicode or a lone return ends no line."""
    (tmp_path / "a.de").write_bytes("eins\u2028zwei\rdrei\r\n\r\nfünf".encode())
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(b"one two three\n\nfive\n"))
    (tmp_path / "b.txt").write_text("six\n", encoding="utf-8")
    source = [str(tmp_path / "a.de"), str(tmp_path / "b.txt")]
    target = [str(tmp_path / "a.en.gz"), str(tmp_path / "b.txt")]
    arguments = translation_data.DataArguments(train_source=source, train_target=target)
    data = translation_data.load_pairs(arguments)
    assert list(data) == ["train"]
    assert data["train"]["source"][:] == ["eins\u2028zwei\rdrei", "", "fünf", "six"]
    assert data["train"]["target"][:] == ["one two three", "", "five", "six"]


def test_what_does_not_belong_together_is_refused(tmp_path):
    for name, text in (("a", "1\n2\n3\n"), ("b", "1\n2\n")):
        (tmp_path / name).write_text(text)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for arguments, message in (
        ({"train_source": [a], "train_target": [b]}, "a has 3 lines, but .*b has 2"),
        ({"test_source": [a, b], "test_target": [a]}, "got 2 sources and 1 targets"),
        ({"validation_target": [a]}, "got 0 sources and 1 targets"),
        ({}, "no texts: name a data set"),
        ({"dataset_name": "some/name", "test_source": [a]}, "--dataset_name and --test_source name data in more than"),
        ({"dataset_name": "some/name", "source_lang": "de"}, "needs --source_lang and --target_lang"),
    ):
        with pytest.raises(ValueError, match=message):
            translation_data.load_pairs(translation_data.DataArguments(**arguments))


@pytest.mark.parametrize("nested", [True, False])
def test_both_forms_of_data_sets_on_the_hub(nested, tmp_path):
    """Texts in a column `translation`, or in a column for each language."""
    rows = [{"de": "hund", "en": "dog", "fr": "chien"}] * 3
    for split in ("train", "test"):
        lines = [json.dumps({"id": place, "translation": row} if nested else row) for place, row in enumerate(rows)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    data = translation_data.load_pairs(
        translation_data.DataArguments(dataset_name=str(tmp_path), source_lang="en", target_lang="fr")
    )
    assert list(data) == ["train", "test"]
    for part in data.values():
        assert part[2] == {"source": "dog", "target": "chien"}


def test_marks_of_a_tokenizer_that_is_trained(tmp_path):
    """Every text has an end that is learnt, because padding is something else."""
    tokenizer = training.train_tokenizer(["the cat sat"] * 9, 300)
    run_translation.separate_marks(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for known in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        marks = (known.pad_token_id, known.bos_token_id, known.eos_token_id)
        assert len(set(marks)) == 3
        for words in (known("the cat"), known(text_target="the cat", truncation=True, max_length=2)):
            assert words["input_ids"][-1] == known.eos_token_id
            assert not {*words["input_ids"][:-1]} & {*marks}
        assert (
            known.decode([*known("the cat")["input_ids"], known.pad_token_id], skip_special_tokens=True) == "the cat"
        )
        size = len(known)
        run_translation.separate_marks(known)
        assert len(known) == size
    run_translation.separate_marks(ByT5Tokenizer(extra_ids=0))
    endless = training.train_tokenizer(["the cat sat"] * 9, 300)
    endless.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(ValueError, match="no eos_token behind a text"):
        run_translation.separate_marks(endless)


@pytest.fixture
def pairs(tmp_path):
    """Sentences that are translated word for word; those of the test are new. What the command line says of them."""
    draw = random.Random(0)
    arguments = []
    for split, count in (("train", 800), ("validation", 30), ("test", 40)):
        sentences = [draw.choices(list(WORDS), k=draw.randint(2, 5)) for _ in range(count)]
        texts = {
            "source": "".join(" ".join(words) + "\n" for words in sentences),
            "target": "".join(" ".join(WORDS[word] for word in words) + "\n" for words in sentences),
        }
        for side, text in texts.items():
            path = tmp_path / f"{split}.{side}.gz"
            path.write_bytes(gzip.compress(text.encode()))
            arguments += [f"--{split}_{side}", str(path)]
    arguments += "--use_cpu --report_to none --disable_tqdm 1 --max_target_length 16".split()  # noqa: SIM905
    arguments += "--per_device_train_batch_size 32 --per_device_eval_batch_size 32 --learning_rate 1e-2".split()  # noqa: SIM905
    return arguments


BYTES = ["--tokenizer_name", "bytes"]


def scratch(model_type, vocabulary=("--vocab_size", "400"), **changes):
    settings = json.dumps(SMALL[model_type] | changes)
    return ["--model_type", model_type, "--config_overrides", settings, *vocabulary]


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["neural", "full"])
def test_a_dictionary_is_learnt(assignment, pairs, tmp_path):
    """From scratch, with smoothed labels and sentences sorted by length, whose translations stay in order."""
    folder = tmp_path / "run"
    common = [*pairs, "--num_beams", "2", "--label_smoothing_factor", "0.1", "--output_dir", str(folder)]
    common += "--train_sampling_strategy group_by_length --do_eval --do_predict".split()  # noqa: SIM905
    metrics = run_translation.main(
        [*common, *scratch("clusterformer", assignment=assignment), "--do_train", "--max_steps", "250"]
    )
    assert metrics["test_bleu"] > 50
    assert metrics["eval_bleu"] > 50
    assert json.loads((folder / "all_results.json").read_text())["test_bleu"] == metrics["test_bleu"]
    assert (len(lines(folder / "eval_translations.txt")), len(lines(folder / "test_translations.txt"))) == (30, 40)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert model.config.decoder_start_token_id == AutoTokenizer.from_pretrained(folder).bos_token_id
    again = run_translation.main([*common, "--model_name_or_path", str(folder), "--num_beams", "1"])
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-5)
    loss_only = run_translation.main([*common[:-1], "--prediction_loss_only", "--model_name_or_path", str(folder)])
    assert "eval_bleu" not in loss_only


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_as_one_that_was_not(pairs, tmp_path):
    common = [*pairs, *scratch("clusterformer", hidden_dropout_prob=0.1), "--do_train", "--do_predict"]
    common += ["--max_steps", "40", "--save_steps", "20"]
    whole, resumed = whole_and_resumed(run_translation.main, common, tmp_path, step=20)
    assert resumed["test_loss"] == pytest.approx(whole["test_loss"], abs=1e-6)
    assert resumed["test_bleu"] == pytest.approx(whole["test_bleu"])
    translations = [lines(tmp_path / name / "test_translations.txt") for name in ("whole", "stopped")]
    assert translations[0] == translations[1]


@pytest.mark.slow_except("clusterformer-more0")
@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("clusterformer", ["--bf16"]),
        ("clusterformer", BYTES),
        ("t5", ["--source_prefix", "translate: ", "--label_smoothing_factor", "0.1"]),
        ("marian", ["--num_beams", "3", "--bf16"]),
    ],
)
def test_kinds_of_models(model_type, more, pairs, tmp_path, monkeypatch):
    """A few steps; what they are given is masked where it is padding, and ends where the text does."""
    batches = []
    collate = run_translation.PairCollator.__call__

    def watched(self, features, return_tensors=None):
        batches.append((self.tokenizer, collate(self, features, return_tensors)))
        return batches[-1][1]

    monkeypatch.setattr(run_translation.PairCollator, "__call__", watched)
    samples = "--max_train_samples 90 --max_eval_samples 7 --max_predict_samples 5 --max_steps 4".split()  # noqa: SIM905
    changes = {"max_position_embeddings": 64, "vocabulary": ()} if more == BYTES else {}
    samples += ["--do_train", "--do_eval", "--do_predict", "--output_dir", str(tmp_path / "run")]
    metrics = run_translation.main([*pairs, *scratch(model_type, **changes), *more, *samples])
    assert math.isfinite(metrics["train_loss"])
    assert [len(lines(tmp_path / "run" / f"{name}_translations.txt")) for name in ("eval", "test")] == [7, 5]
    for tokenizer, batch in batches:
        inputs = {"input_ids", "attention_mask"}
        assert set(batch) == inputs | {f"decoder_{name}" for name in inputs} | {"labels"}
        assert ((batch["input_ids"] != tokenizer.pad_token_id) == batch["attention_mask"].bool()).all()
        ends = batch["labels"] == tokenizer.eos_token_id
        assert (ends.sum(dim=1) == 1).all()
        assert (batch["decoder_attention_mask"].sum(dim=1) == ends.long().argmax(dim=1) + 1).all()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert (model.config.model_type, model.config.eos_token_id) == (model_type, tokenizer.eos_token_id)
    assert getattr(model.generation_config, "forced_eos_token_id", None) in (None, tokenizer.eos_token_id)
    assert (batch["decoder_input_ids"][:, 0] == model.config.decoder_start_token_id).all()


@pytest.mark.slow
def test_smoothed_labels_leave_the_losses_of_the_clustering(pairs, tmp_path):
    """Trainer's smoothing computes the loss of the words outside of the model, which would lose its others."""
    losses = {}
    common = [*pairs, "--do_train", "--max_steps", "1", "--save_strategy", "no", "--output_dir", str(tmp_path / "run")]
    for smoothing in ("0", "0.1"):
        for weight in (0.0, 1.0):
            model = scratch("clusterformer", cluster_loss_weight=weight, sorting_loss_weight=weight)
            metrics = run_translation.main([*common, *model, "--label_smoothing_factor", smoothing])
            losses[smoothing, weight] = metrics["train_loss"]
    expected = losses["0", 1.0] - losses["0", 0.0]
    assert abs(expected) > 0.1
    assert losses["0.1", 1.0] - losses["0.1", 0.0] == pytest.approx(expected, abs=1e-4)
