"""`embed`: vectors of the documents of a folder or file, resumable after a kill.

The documents are counted and their lengths taken, so that the plan of batches, and with it every bit of the vectors,
is fixed before any runs: a run that was stopped and went on ends with the file of an unbroken one (on the same machine
with as many threads).
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..measuring.candidates import make_candidates
from ..measuring.cost import timed
from ..measuring.environment import environment, usable_device
from ..patching import extend_positions, patch_attention
from ..patching.model_types.stacks import find_stacks
from ..patching.stored import FIELD, read_stored
from ..reporting.findings import ERROR_OF
from ..reporting.numbers import count
from ..samples.model import TextModel, load_text_model
from ..version import __version__
from .choice import exact_method, fastest_method, is_long_enough
from .documents import Document, Folder, JSONLines, Skipped, UnreadableError, as_shown, open_documents
from .encoder import Encoder, longest_sequence
from .kept import LOCK, SKIPPED, VECTORS, RunFolder
from .options import EmbedOptions
from .plan import TIMED_AT, Batch, Pace, at_quantiles, plan_windows
from .pooling import pooling_of, stored_pooling
from .tokens import Tokens

# Tokens of a document that are read where neither the model nor the user names a limit; of chunked documents.
LONGEST, LONGEST_IN_CHUNKS = 65_536, 2**20
# Shares of all tokens: how long the documents are that a method is tried on.
TRIED_AT = (0.5, 0.9)
SHORTEST_TIMING_SECONDS = 1.0


@dataclass
class Progress:
    """Where a run tells how it goes.

    Args:
        say (`Callable`): gets a line of words.
        advance (`Callable`): gets `(done, total, what)`, of documents or of the steps that choose a method.
    """

    say: Callable[[str], None]
    advance: Callable[[int, int, str], None]


def embed(options: EmbedOptions, progress: Progress) -> Path:
    """Embed the documents, or go on with it.

    Args:
        options (`EmbedOptions`): what and how.
        progress (`Progress`): told before the start how long it will take.

    Returns:
        `Path`: the file of vectors. Beside it are `ids.jsonl` (of npy), `skipped.jsonl` and the manifest `embed.json`.

    Raises:
        ValueError: options that contradict each other, a model that cannot do it, documents longer than it takes, a
            folder of a run with other options, no document that can be read.
        OSError: no such model, no such documents.
    """
    options.check()
    source = open_documents(options.documents, options.text_field, options.id_field)
    folder = RunFolder(options.output)
    run = _Run(options, source, folder, progress)
    run.check_model()
    folder.make()
    try:
        with FileLock(options.output / LOCK, timeout=0):
            return run.run()
    except Timeout:
        raise ValueError(f"--output: another run is writing to {options.output} just now") from None


class _Run:
    """One run; `begun` is its manifest as far as it is known."""

    def __init__(
        self, options: EmbedOptions, source: Folder | JSONLines, folder: RunFolder, progress: Progress
    ) -> None:
        self.options, self.source, self.folder, self.progress = options, source, folder, progress

    def check_model(self) -> None:
        """Raise where the model or the lengths do not serve, before anything is written."""
        _ = self.encoder, self.most_tokens

    def run(self) -> Path:
        settings = self._asked()
        begun = self.folder.manifest()
        if begun is None:
            self.folder.clear_shards()
            self.progress.say("Reading the documents.")
            scanned, skipped = self._scan()
            self.folder.write_documents(scanned, skipped)
            begun = {
                "model": self.options.model,
                "asked": settings,
                "error_of": ERROR_OF,
                "chosen": self._choose(scanned),
                **_counts(scanned, skipped),
            }
            self.folder.write_manifest(**begun, finished=False)
        else:
            _check_same(begun["asked"], settings, self.options.output)
            begun.pop("format")
            if begun.pop("finished"):
                self.folder.clean()
                self.progress.say(f"{self.options.output} is finished already; delete it to start anew.")
                return self.options.output / VECTORS[self.options.form]
            self.progress.say("Going on with what an earlier run left.")
        documents = self.folder.documents()
        self._prepare(begun["chosen"], documents)
        windows = plan_windows([tokens for _, tokens in documents], self.options.batch_tokens)
        seconds = self._embed(list(chain.from_iterable(windows)), documents)
        path = self.folder.put_together(self.options.form, windows, documents)
        self.folder.write_manifest(**begun, finished=True, environment=environment(self.model.device), seconds=seconds)
        self.folder.clean()
        return path

    @cached_property
    def _loaded(self) -> TextModel:
        device = usable_device(self.options.device)
        loaded = load_text_model(self.options.model, self.options.dtype)
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(loaded.model).__name__} is an encoder with a decoder: name an encoder or a decoder alone"
            )
        stored = getattr(loaded.model.config, FIELD, None)
        if stored is not None:
            settings, _ = read_stored(stored)
            if settings.needs_fine_tuning and (self.options.method or self.options.max_error):
                raise ValueError(
                    f'the model is a conversion to "{settings.method}", fine-tuned as one: leave --method and '
                    "--max-error out"
                )
            if self.options.method is None and self.options.max_error is None:
                loaded = load_text_model(self.options.model, self.options.dtype, patched=True)
        loaded.model.to(device)
        return loaded

    @property
    def model(self) -> PreTrainedModel:
        return self._loaded.model

    @cached_property
    def encoder(self) -> Encoder:
        loaded, mode = self._loaded, self.options.pooling
        pooling = (
            stored_pooling(self.options.model, mode) if loaded.around is None else pooling_of(loaded.around, mode)
        )
        for layer in (*pooling.before, *pooling.layers):
            layer.to(loaded.model.device, loaded.model.dtype)
        normalize = pooling.normalize if self.options.normalize is None else self.options.normalize
        if self.options.normalize:
            pooling = replace(pooling, normalize=False)  # what is cut gets its length afterwards
        return Encoder(loaded.model, loaded.tokenizer, pooling, normalize, self.options.batch_tokens)

    @cached_property
    def tokens(self) -> Tokens:
        prompt = self.options.prompt
        return Tokens(self.encoder.tokenizer, self.encoder.pooling.document_prompt if prompt is None else prompt)

    @cached_property
    def limit(self) -> int | None:
        """The tokens that the model takes as it was loaded."""
        return longest_sequence(self.model, self.encoder.tokenizer)

    @cached_property
    def most_tokens(self) -> int:
        """The tokens of a document that are read, special ones included."""
        options, limit = self.options, self.limit
        if options.chunk is not None:
            if limit is not None and options.chunk > limit:
                raise ValueError(f"--chunk {options.chunk} is longer than the {limit:,} tokens that the model takes")
            self.tokens.own_tokens(options.chunk)
            return options.max_length or LONGEST_IN_CHUNKS
        if options.extend_positions:
            return options.max_length or LONGEST
        if options.max_length is not None and limit is not None and options.max_length > limit:
            raise ValueError(
                f"--max-length {options.max_length} is longer than the {limit:,} tokens that the model takes: add "
                "--extend-positions, or divide the documents with --chunk"
            )
        return options.max_length or limit or LONGEST

    def _asked(self) -> dict[str, Any]:
        """What must be the same for a run to go on: the options, the weights and words of the model, the documents."""
        # The weights and contents say more than their names.
        options = {
            name: value for name, value in asdict(self.options).items() if name not in ("model", "documents", "output")
        }
        vocabulary = json.dumps(sorted(self.encoder.tokenizer.get_vocab().items())).encode()
        pooling = self.encoder.pooling
        layers = [layer.state_dict() for layer in (*pooling.before, *pooling.layers)]
        versions = {"hf_effattn": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return json.loads(
            json.dumps(
                {
                    **options,
                    "device": self.model.device.type,
                    "weights": _digest([self.model.state_dict(), *layers]),
                    "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
                    "stored pooling": [
                        pooling.mode,
                        self.encoder.normalize,
                        pooling.truncate_dim,
                        pooling.document_prompt,
                    ],
                    "contents of the documents": self.source.digest(),
                    "versions": versions,
                }
            )
        )

    def _scan(self) -> tuple[list[tuple[Document, int]], list[Skipped]]:
        """The documents with the tokens of each, and what is skipped or cut."""
        most, options = self.most_tokens, self.options
        documents, skipped, cut = [], [], 0
        for document in self.source.documents():
            if isinstance(document, Skipped):
                skipped.append(document)
                continue
            try:
                sequence, is_cut = self.tokens.sequence(self.source.pieces(document), most)
            except UnreadableError as error:
                skipped.append(Skipped(document.id, "skipped", str(error)))
                continue
            if len(sequence) == self.tokens.fewest:
                skipped.append(Skipped(document.id, "skipped", "empty"))
                continue
            if is_cut:
                cut += 1
                skipped.append(Skipped(document.id, "cut", f"only its first {most:,} tokens are read"))
            documents.append((document, len(sequence)))
        if not documents:
            self.folder.write_documents(documents, skipped)
            why = (
                f": {options.output / SKIPPED} says why ({len(skipped):,} skipped)" if skipped else ", nothing at all"
            )
            raise ValueError(f"{options.documents} has no document to embed{why}")
        allowed = options.max_length or options.extend_positions or options.chunk or self.limit is None
        if cut and not allowed:
            first = next(skip for skip in skipped if skip.what == "cut")
            raise ValueError(
                f"{cut:,} of {len(documents):,} documents have more than the {most:,} tokens that the model takes "
                f"(the first is {as_shown(first.id)}): --extend-positions repeats learned positions, --chunk {most} "
                f"takes the mean of chunks, --max-length {most} cuts"
            )
        if len(skipped) > cut:
            self.progress.say(f"{count(len(skipped) - cut, 'document')} skipped: {options.output / SKIPPED} says why.")
        if cut:
            self.progress.say(
                f"{count(cut, 'document')} cut at {most:,} tokens: {options.output / SKIPPED} names them."
            )
        return documents, skipped

    def _sequences(self, document: Document, tokens: int) -> list[list[int]]:
        """The token ids of a document, in chunks where it is divided."""
        try:
            sequence, _ = self.tokens.sequence(self.source.pieces(document), self.most_tokens)
        except UnreadableError:
            sequence = []
        if len(sequence) != tokens:
            raise ValueError(f"{as_shown(document.id)} was changed during the run: delete the output and start anew")
        return [sequence] if self.options.chunk is None else self.tokens.chunks(sequence, self.options.chunk)

    def _extend(self, documents: Sequence[tuple[Document, int]]) -> None:
        longest = max(tokens for _, tokens in documents)
        if self.options.extend_positions and self.limit is not None and longest > self.limit:
            extend_positions(self.model, longest)

    def _choose(self, documents: Sequence[tuple[Document, int]]) -> dict[str, Any] | None:
        """The method of the run, with its settings; None for the model's own."""
        if self.options.max_error is None:
            return self.options.method or exact_method(self.model)
        self._extend(documents)
        counts = [tokens for _, tokens in documents]
        lengths = [min(tokens, self.options.chunk or tokens) for tokens in counts]
        if not is_long_enough(max(lengths), self.model):
            return None
        tried = [
            self._sequences(*documents[index])[0]
            for index in at_quantiles(lengths, counts, TRIED_AT)
            if is_long_enough(lengths[index], self.model)
        ] or [self._sequences(*documents[int(np.argmax(lengths))])[0]]
        longest = max(map(len, tried))
        self.progress.say(f"Measuring the methods on {len(tried)} of the longer texts, of up to {longest:,} tokens.")
        return fastest_method(self.model, tried, self.options.max_error, self.progress.advance)

    def _prepare(self, chosen: dict[str, Any] | None, documents: Sequence[tuple[Document, int]]) -> None:
        """The model as the documents need it."""
        self._extend(documents)
        if chosen is None:
            if self.options.max_error is not None:
                self.progress.say("No method is faster within --max-error: exact attention.")
            return
        settings = {name: value for name, value in chosen.items() if name != "hidden_error"}
        patch_attention(self.model, **settings)
        kinds = {stack.causal for stack in find_stacks(self.model)}
        error = f", error {chosen['hidden_error']:.3f}" if "hidden_error" in chosen else ""
        self.progress.say(f"Attention: {make_candidates([settings], kinds=kinds)[0].label}{error}.")

    def _embed(self, batches: Sequence[Batch], documents: Sequence[tuple[Document, int]]) -> float:
        """Run the batches that have no shard yet; first some that tell how long the others will take."""
        missing = [index for index in range(len(batches)) if not self.folder.has(index)]
        lengths = [min(batches[index].longest, self.options.chunk or batches[index].longest) for index in missing]
        tokens = [batches[index].tokens for index in missing]
        first = at_quantiles(lengths, tokens, TIMED_AT) if missing else []
        if first:
            longest = max(lengths[place] for place in first)
            self.progress.say(f"Timing {len(first)} of {len(missing):,} batches, of up to {longest:,} tokens a text.")
        timings = [
            self._timed(missing[place], batches, documents, again=number == 0) for number, place in enumerate(first)
        ]
        done = sum(len(batch.documents) for index, batch in enumerate(batches) if self.folder.has(index))
        if not missing:
            return 0.0
        pace = Pace([lengths[place] for place in first], [tokens[place] for place in first], timings)
        left = {
            index: pace.seconds(lengths[place], tokens[place])
            for place, index in enumerate(missing)
            if place not in first
        }
        total, spent = len(documents), sum(timings)
        rest_takes = f"the other {total - done:,} take about {duration(sum(left.values()))} on {self.model.device}"
        self.progress.say(
            f"{count(total, 'document')}, {sum(batch.tokens for batch in batches):,} tokens, the longest "
            f"{max(batch.longest for batch in batches):,}: {done:,} are done{', ' + rest_takes if left else ''}."
        )
        start, predicted, rest = time.perf_counter(), 0.0, sum(left.values())
        for index, expected in left.items():
            self._timed(index, batches, documents)
            predicted, rest = predicted + expected, rest - expected
            done += len(batches[index].documents)
            slower = (time.perf_counter() - start) / predicted if predicted else 1.0
            self.progress.advance(done, total, f"documents, about {duration(max(0.0, rest * slower))} left")
        return spent + time.perf_counter() - start

    def _timed(
        self, index: int, batches: Sequence[Batch], documents: Sequence[tuple[Document, int]], again: bool = False
    ) -> float:
        """Run a batch and keep its vectors; the seconds it took, of a second time where the first was short."""

        def run() -> np.ndarray:
            return self.encoder.encode([self._sequences(*documents[number]) for number in batches[index].documents])

        try:
            vectors, seconds = timed(run, self.model.device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise ValueError(
                f"a batch of {batches[index].tokens:,} tokens, the longest document {batches[index].longest:,}, does "
                f"not fit into memory ({str(error).splitlines()[0]}): lower --batch-tokens or --max-length, or --chunk"
            ) from None
        if again and seconds < SHORTEST_TIMING_SECONDS:  # the first call of all is slower
            _, seconds = timed(run, self.model.device)
        if not np.isfinite(vectors).all():
            row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
            name = as_shown(documents[batches[index].documents[row]][0].id)
            raise ValueError(f"the vector of {name} is not finite in {self.options.dtype}: try float32")
        self.folder.add(index, vectors)
        return seconds


def _counts(documents: Sequence[tuple[Document, int]], skipped: Sequence[Skipped]) -> dict[str, int]:
    """What the manifest says of the documents."""
    kinds = [skip.what for skip in skipped]
    return {
        "documents": len(documents),
        "tokens": sum(tokens for _, tokens in documents),
        "longest": max(tokens for _, tokens in documents),
        "skipped": kinds.count("skipped"),
        "cut": kinds.count("cut"),
    }


def _check_same(begun: dict[str, Any], settings: dict[str, Any], output: Path) -> None:
    """Raise where a run was begun with something else."""
    differ = [name for name in begun | settings if begun.get(name) != settings.get(name)]
    if differ:
        long = [name for name in differ if len(str(begun.get(name))) > 40]
        changes = [
            f"{name} changed" if name in long else f"{name}: {begun.get(name)}, now {settings.get(name)}"
            for name in differ
        ]
        raise ValueError(
            f"--output: the run in {output} was begun with something else ({'; '.join(changes)}): name another "
            "folder, or delete this one"
        )


def _digest(states: Sequence[dict[str, torch.Tensor]]) -> str:
    """A hash of weights."""
    whole = hashlib.sha256()
    for name, tensor in _items(states):
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _items(states: Sequence[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return chain.from_iterable(state.items() for state in states)


def duration(seconds: float) -> str:
    """Seconds as words, such as `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
