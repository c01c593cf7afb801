"""What is claimed of ClusterFormer, on the weights of a trained one: it classifies, whatever a text is padded with."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_effattn import ClusterFormerConfig

FOLDER = Path(__file__).resolve().parents[2] / "model_cards" / "clusterformer-20news"
MESSAGES = 150


@pytest.fixture(scope="module")
def model():
    return AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_command_of_its_card_makes_its_configuration():
    """A default that changes later would make another model."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    overrides = dict(re.findall(r"([a-z_]+)=([^,\n]+)", "\n".join(re.findall(r"^SIZES=.*$", card, re.MULTILINE))))
    made = ClusterFormerConfig(**{name: json.loads(value) for name, value in overrides.items()}).settled().to_dict()
    kept = ClusterFormerConfig.from_pretrained(FOLDER).to_dict()
    of_the_data = {"vocab_size", "id2label", "label2id", "dtype", "architectures", "problem_type", "use_cache"}
    of_the_data |= {name for name in kept if name.endswith("_token_id")}
    different = {name for name in kept if kept[name] != made.get(name)} - of_the_data
    assert different == set()


@torch.no_grad()
def test_a_padded_batch_gives_what_its_texts_give_alone(model, tokenizer):
    texts = ["The goalie stopped every shot of the playoff game.", "The shuttle was launched into orbit."]
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=4e-6)
    names = [model.config.id2label[number] for number in alone.argmax(dim=1).tolist()]
    assert names == ["rec.sport.hockey", "sci.space"]


@pytest.mark.slow
@torch.no_grad()
def test_the_accuracy_is_that_of_its_card(model, tokenizer, large_data):
    with gzip.open(large_data("20newsgroups/test.jsonl.gz"), "rt", encoding="utf-8") as file:
        messages = [json.loads(line) for line in file]
    drawn = torch.randperm(len(messages), generator=torch.Generator().manual_seed(0))[:MESSAGES].tolist()
    right = 0
    for start in range(0, MESSAGES, 50):
        part = [messages[place] for place in drawn[start : start + 50]]
        options = {"truncation": True, "max_length": 512, "padding": True, "return_tensors": "pt"}
        guessed = model(**tokenizer([row["text"] for row in part], **options)).logits.argmax(dim=1)
        right += sum(model.config.id2label[int(a)] == row["label"] for a, row in zip(guessed, part, strict=True))
    reported = json.loads((FOLDER / "all_results.json").read_text(encoding="utf-8"))["test_accuracy"]
    deviation = (reported * (1 - reported) / MESSAGES) ** 0.5
    assert abs(right / MESSAGES - reported) < 3 * deviation
