"""Train an embedder on long texts that are told from others of their kind by short ones about them.

A step has as many parts of texts as its tokens allow, of half the texts at most. Each is a batch of its own, without
padding, and stays in memory until the loss is known: to embed it twice, as losses with cached gradients do, takes a
third longer. The vectors that texts had some steps ago would cost nothing, but to tell what is new from what is old
would be enough.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import track
from sentence_transformers import SentenceTransformer
from torch.nn.utils.rnn import pad_sequence

from hf_effattn.samples.texts import special_tokens

from .long_embedder_data import SPECIAL, Source

AT_A_TIME = 4  # short texts that are padded to one length
NEGATIVES = 64  # short texts about others than those in a step
WARMUP = 0.1  # of the steps
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Recipe:
    """How a model learns.

    Args:
        lengths (`tuple[int, ...]`): tokens of the parts to train on, of which one is drawn for each step.
        step_tokens (`int`): of a step at most: as many parts as fit, of half the texts at most.
        learning_rate (`float`): at its highest: it rises for a tenth of the steps, and falls to 0.
        scale (`float`): factor of the cosines, 1 / temperature.
        seed (`int`): of the texts of each step, their parts and the dropout.
    """

    lengths: tuple[int, ...]
    step_tokens: int
    learning_rate: float
    scale: float
    seed: int

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, from 0."""
        warmup = math.ceil(steps * WARMUP)
        return self.learning_rate * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))


def features_of(model: SentenceTransformer, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """What the model reads of texts: their token ids, here without the special ones, and the mask of the padding."""
    before, after = special_tokens(model.tokenizer)
    rows = [torch.tensor([*before, *ids, *after]) for ids in texts]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True, padding_value=model.tokenizer.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask}


def embed(model: SentenceTransformer, texts: list[list[int]]) -> torch.Tensor:
    """Vectors `(texts, d)` of token ids without the special ones."""
    vectors: torch.Tensor = model(features_of(model, texts))["sentence_embedding"]
    return vectors


def embed_short(model: SentenceTransformer, texts: list[list[int]]) -> torch.Tensor:
    """The same of many texts, a few of about one length at a time."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    groups = [order[start : start + AT_A_TIME] for start in range(0, len(order), AT_A_TIME)]
    vectors = torch.cat([embed(model, [texts[number] for number in group]) for group in groups])
    return vectors[torch.tensor(order).argsort()]


def contrastive_loss(
    parts: torch.Tensor, anchors: torch.Tensor, owners: torch.Tensor, negatives: torch.Tensor, scale: float
) -> torch.Tensor:
    """How well short texts tell their own part from the others, and parts their own short texts from all others.

    Args:
        parts (`torch.Tensor`): `(n, d)`, of length 1, as all.
        anchors (`torch.Tensor`): `(m, d)`, short texts about them.
        owners (`torch.Tensor`): `(m,)`, which part each is about.
        negatives (`torch.Tensor`): `(k, d)`, short texts about none of them.
        scale (`float`): factor of the cosines.

    Returns:
        `torch.Tensor`: the mean of both cross-entropies.
    """
    scores = scale * anchors @ parts.T
    own = scores[torch.arange(len(owners)), owners]
    to_parts = torch.nn.functional.cross_entropy(scores, owners)
    of_others = scores.masked_fill(owners[:, None] == torch.arange(len(parts)), -math.inf)
    against = torch.cat([of_others, scale * negatives @ parts.T]).logsumexp(dim=0)
    to_anchors = torch.nn.functional.softplus(against[owners] - own).mean()
    return (to_parts + to_anchors) / 2


@dataclass(frozen=True)
class Batch:
    """What a step learns from, as token ids.

    Args:
        parts (`list[list[int]]`): of long texts.
        anchors (`list[list[int]]`): short texts about them.
        owners (`list[int]`): which part each of these is about.
        negatives (`list[list[int]]`): short texts about others.
    """

    parts: list[list[int]]
    anchors: list[list[int]]
    owners: list[int]
    negatives: list[list[int]]


def drawn(sources: list[Source], recipe: Recipe, step: int) -> Batch:
    """The batch of a step: half of the texts at most, in every second step of one kind, the hardest to tell apart."""
    draw = Random(f"{recipe.seed} {step}")
    length = draw.choice(recipe.lengths)
    kind = draw.choice(sources).kind
    among = [source for source in sources if source.kind == kind or step % 2]
    chosen = draw.sample(among, min(recipe.step_tokens // length, -(-len(among) // 2)))
    found = [source.part(length, draw) for source in chosen]
    about = [
        (owner, source.anchors[number])
        for owner, (source, (_, numbers)) in enumerate(zip(chosen, found, strict=True))
        for number in numbers
    ]
    names = {source.name for source in chosen}
    others = [anchor for source in among if source.name not in names for anchor in source.anchors]
    return Batch(
        [part for part, _ in found],
        [anchor for _, anchor in about],
        [owner for owner, _ in about],
        draw.sample(others, min(NEGATIVES, len(others))),
    )


@dataclass
class Training:
    """A model that learns, step by step, which can be kept in a file between two steps.

    Args:
        model (`SentenceTransformer`): its last module makes vectors of length 1.
        sources (`list[Source]`): what it learns from.
        recipe (`Recipe`): how.
        steps (`int`): in all.
    """

    model: SentenceTransformer
    sources: list[Source]
    recipe: Recipe
    steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.recipe.learning_rate)

    def step(self) -> None:
        """Learn from the next batch."""
        step = len(self.losses)
        batch = drawn(self.sources, self.recipe, step)
        start, cpu_start = time.perf_counter(), time.process_time()
        self.model.train()
        torch.manual_seed(self.recipe.seed + step)
        parts = torch.cat([embed(self.model, [part]) for part in batch.parts])
        anchors, negatives = (embed_short(self.model, texts) for texts in (batch.anchors, batch.negatives))
        loss = contrastive_loss(parts, anchors, torch.tensor(batch.owners), negatives, self.recipe.scale)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step + 1} is {loss.item()}: lower the learning rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.lengths.append(max(map(len, batch.parts)) + SPECIAL)
        self.tokens.append(sum(map(len, [*batch.parts, *batch.anchors, *batch.negatives])))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)

    def save(self, path: Path) -> None:
        """Keep all that the next step depends on; an older file stays until this one is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".part")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | self.kept(), written)
        written.replace(path)

    def load(self, path: Path) -> None:
        """Go on where `save` was called."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state.pop("model"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        for name, value in state.items():
            setattr(self, name, value)

    def kept(self) -> dict[str, Any]:
        """What the steps so far have been."""
        names = ("losses", "seconds", "cpu_seconds", "lengths", "tokens")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> dict[str, Any]:
        """A row of results."""
        return {
            "losses": [round(loss, 4) for loss in self.losses],
            "train_tokens": sum(self.tokens),
            "train_seconds": round(sum(self.seconds), 1),
            "train_cpu_seconds": round(sum(self.cpu_seconds), 1),
        }


def run_to_the_end(training: Training, path: Path, description: str) -> None:
    """All steps that are left, from the file on that an interrupted run has kept."""
    run_in_turns([training], [path], description)


def run_in_turns(trainings: list[Training], paths: list[Path], description: str = "steps") -> None:
    """The same of several trainings with as many steps, a step of each in turn: what slows one slows all."""
    for training, path in zip(trainings, paths, strict=True):
        if path.exists():
            training.load(path)
    done = min(len(training.losses) for training in trainings)
    for step in track(range(done, trainings[0].steps), description=description):
        for training, path in zip(trainings, paths, strict=True):
            if len(training.losses) == step:
                training.step()
                training.save(path)
