"""`embed`: vectors of the documents of a folder or file, resumable after a kill, by one process or several.

The documents are counted and their lengths taken, so that the plan of batches, and with it every bit of the vectors,
is fixed before any runs: a run that was stopped and went on, or that several ranks share, ends with the file of an
unbroken one of one process (on machines of the same kind, with as many threads in each process).
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout

from ..measuring.candidates import make_candidates
from ..measuring.cost import timed
from ..measuring.environment import environment
from ..patching.model_types.stacks import find_stacks
from ..reporting.findings import ERROR_OF
from ..reporting.numbers import count
from ..version import __version__
from .choice import exact_method, fastest_method, is_long_enough
from .documents import Document, Folder, JSONLines, Skipped, UnreadableError, as_shown, open_documents
from .kept import LOCK, SKIPPED, VECTORS, RunFolder, Shards
from .loaded import LoadedModel
from .options import EmbedOptions
from .plan import TIMED_AT, Batch, Pace, Remaining, at_quantiles, neighbours, plan_windows
from .ranks import Rank

# Shares of all tokens: how long the documents are that a method is tried on.
TRIED_AT = (0.5, 0.9)
SHORTEST_TIMING_SECONDS = 1.0
COUNTED_BYTES = 2**22  # of documents whose tokens are counted as one piece of work
# How often rank 0 looks what the others have done, how often they look whether it has begun, and when they say so.
LISTED_SECONDS, POLLED_SECONDS, SILENT_SECONDS = 5.0, 0.2, 60.0


@dataclass
class Progress:
    """Where a run tells how it goes.

    Args:
        say (`Callable`): gets a line of words.
        advance (`Callable`): gets `(done, total, what)`, of documents or of the steps that choose a method.
    """

    say: Callable[[str], None]
    advance: Callable[[int, int, str], None]


class _FinishedError(Exception):
    """Rank 0 has put all together."""


def embed(options: EmbedOptions, progress: Progress, rank: Rank | None = None) -> Path | None:
    """Embed the documents, or go on with it.

    Args:
        options (`EmbedOptions`): what and how.
        progress (`Progress`): told before the start how long it will take; of several ranks only that of rank 0.
        rank (`Rank`, *optional*): which of the processes this is that call with the same options. Default: the only
            one.

    Returns:
        `Path`, *optional*: the file of vectors. Beside it are `ids.jsonl` (of npy), `skipped.jsonl` and the manifest
        `embed.json`. None for ranks other than 0: rank 0 writes the file when all have done their part.

    Raises:
        ValueError: options that contradict each other, a model that cannot do it, documents longer than it takes, a
            folder of a run with other options, no document that can be read.
        OSError: no such model, no such documents.
    """
    options.check()
    rank = rank or Rank()
    source = open_documents(options.documents, options.text_field, options.id_field)
    folder = RunFolder(options.output)
    run = _Run(options, source, folder, progress, rank)
    run.check_model()
    folder.make()
    if not rank.leads:
        return run.run()
    with _alone(options.output):
        return run.run()


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Refuse a second launch into a folder, where its file system has locks.

    Nothing depends on it: files are whole or absent, and what two launches write of the same has the same bits.
    """
    lock = FileLock(output / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"--output: another run is writing to {output} just now") from None
    except (OSError, NotImplementedError):
        pass
    try:
        yield
    finally:
        lock.release()


class _Run:
    """One run, as one rank sees it."""

    def __init__(
        self, options: EmbedOptions, source: Folder | JSONLines, folder: RunFolder, progress: Progress, rank: Rank
    ) -> None:
        self.options, self.source, self.folder, self.rank = options, source, folder, rank
        self.loaded = LoadedModel(
            options, approximates=options.max_error is not None, device=rank.device(options.device)
        )
        self.say_as_any_rank = progress.say
        self.progress = progress if rank.leads else Progress(lambda words: None, lambda done, total, what: None)

    def check_model(self) -> None:
        """Raise where the model or the lengths do not serve, before anything is written."""
        _ = self.loaded.most_tokens

    def run(self) -> Path | None:
        try:
            path = self._run()
            is_finished = self.rank.leads or self.folder.is_finished
        except (_FinishedError, FileNotFoundError):
            # Rank 0 finished meanwhile, and deleted the shards.
            if self.rank.leads or not self.folder.is_finished:
                raise
            path, is_finished = None, True
        if is_finished:
            self.folder.clean()
        return path

    def _run(self) -> Path | None:
        asked = self._asked()
        begun = self._begun(asked)
        if begun is None:
            self.progress.say("Reading the documents.")
        elif begun["finished"]:
            self.progress.say(f"{self.options.output} is finished already; delete it to start anew.")
            return self.options.output / VECTORS[self.options.form] if self.rank.leads else None
        else:
            self.progress.say("Going on with what an earlier run left.")
        documents, skipped = self._count(asked)
        if begun is None:
            begun = self._begin(asked, documents, skipped) if self.rank.leads else self._await_begin(asked)
        self._prepare(begun["chosen"], documents)
        windows = plan_windows([tokens for _, tokens in documents], self.options.batch_tokens)
        shards = self.folder.shards("vectors", [asked, begun["chosen"]])
        seconds = self._embed(shards, list(chain.from_iterable(windows)), documents)
        if not self.rank.leads:
            return None
        path = self.folder.put_together(self.options.form, shards, windows, documents)
        done = {"finished": True, "environment": environment(self.loaded.model.device), "seconds": seconds}
        self.folder.write_manifest(**begun | done)
        return path

    def _begun(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The manifest of the run, None where it was not begun; another run's is an error."""
        begun = self.folder.manifest()
        if begun is not None:
            _check_same(begun["asked"], asked, self.options.output)
            del begun["format"]
        return begun

    def _begin(
        self, asked: dict[str, Any], documents: Sequence[tuple[Document, int]], skipped: Sequence[Skipped]
    ) -> dict[str, Any]:
        begun = {
            "model": self.options.model,
            "asked": asked,
            "error_of": ERROR_OF,
            "chosen": self._choose(documents),
            **_counts(documents, skipped),
            "finished": False,
        }
        self.folder.write_manifest(**begun)
        return begun

    def _await_begin(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The manifest, once rank 0 has written it: what it measures is not the same twice."""
        start, told = time.monotonic(), False
        while (begun := self._begun(asked)) is None:
            if not told and time.monotonic() - start > SILENT_SECONDS:
                told = True
                self.say_as_any_rank(f"Rank {self.rank.number} waits for rank 0, which chooses the method.")
            time.sleep(POLLED_SECONDS)
        if begun["finished"]:
            raise _FinishedError
        return begun

    def _todo(self, shards: Shards, pieces: Sequence[int]) -> Iterator[int]:
        """The pieces that have no shard when their turn comes."""
        for index in pieces:
            if shards.has(index):
                continue
            if not self.rank.leads and self.folder.is_finished:
                raise _FinishedError
            yield index

    def _asked(self) -> dict[str, Any]:
        """What must be the same for a run to go on: the options, the weights and words of the model, the documents."""
        # The weights and contents say more than their names.
        options = {
            name: value for name, value in asdict(self.options).items() if name not in ("model", "documents", "output")
        }
        vocabulary = json.dumps(sorted(self.loaded.encoder.tokenizer.get_vocab().items())).encode()
        pooling = self.loaded.encoder.pooling
        layers = [layer.state_dict() for layer in (*pooling.before, *pooling.layers)]
        versions = {"hf_effattn": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return json.loads(
            json.dumps(
                {
                    **options,
                    "device": self.loaded.model.device.type,
                    "weights": _digest([self.loaded.model.state_dict(), *layers]),
                    "vocabulary": hashlib.sha256(vocabulary).hexdigest(),
                    "stored pooling": [
                        pooling.mode,
                        self.loaded.encoder.normalize,
                        pooling.truncate_dim,
                        pooling.document_prompt,
                    ],
                    "contents of the documents": self.source.digest(),
                    "versions": versions,
                }
            )
        )

    def _count(self, asked: dict[str, Any]) -> tuple[list[tuple[Document, int]], list[Skipped]]:
        """The documents with the tokens of each, and what is skipped or cut."""
        listed = list(self.source.documents())
        found = [document for document in listed if isinstance(document, Document)]
        pieces = neighbours([document.size for document in found], COUNTED_BYTES)
        sizes = [sum(found[index].size for index in piece) for piece in pieces]
        shards = self.folder.shards("counts", asked)
        for piece in self._todo(shards, list(chain(*self.rank.shares(sizes)))):
            counted = json.dumps([self._tokens_of(found[index]) for index in pieces[piece]]).encode()
            shards.add(piece, methodcaller("write", counted))
        counts = [counted for piece in range(len(pieces)) for counted in json.loads(shards.path(piece).read_bytes())]
        if len(counts) != len(found):
            raise ValueError("the documents were changed during the run: delete the output and start anew")
        documents, skipped, cut = [], [], 0
        counted_tokens = iter(counts)
        for document in listed:
            if isinstance(document, Skipped):
                skipped.append(document)
                continue
            tokens, why = next(counted_tokens)
            if tokens:
                documents.append((document, tokens))
                cut += bool(why)
            if why:
                skipped.append(Skipped(document.id, "cut" if tokens else "skipped", why))
        self._tell(documents, skipped, cut)
        return documents, skipped

    def _tokens_of(self, document: Document) -> tuple[int, str]:
        """The tokens of a document that are read, 0 where it is skipped; and why it is skipped or cut."""
        try:
            sequence, is_cut = self.loaded.sequence(self.source.pieces(document))
        except UnreadableError as error:
            return 0, str(error)
        if len(sequence) == self.loaded.tokens.fewest:
            return 0, "empty"
        return len(sequence), f"only its first {self.loaded.most_tokens:,} tokens are read" if is_cut else ""

    def _tell(self, documents: Sequence[tuple[Document, int]], skipped: Sequence[Skipped], cut: int) -> None:
        """Write and say what is skipped or cut; raise where nothing is left, and where nobody asked for a cut."""
        output, most = self.options.output, self.loaded.most_tokens
        if self.rank.leads:
            self.folder.write_skipped(skipped)
        if not documents:
            why = f": {output / SKIPPED} says why ({len(skipped):,} skipped)" if skipped else ", nothing at all"
            raise ValueError(f"{self.options.documents} has no document to embed{why}")
        if cut and not self.loaded.cuts:
            first = next(skip for skip in skipped if skip.what == "cut")
            raise ValueError(
                f"{cut:,} of {len(documents):,} documents have more than the {most:,} tokens that the model takes "
                f"(the first is {as_shown(first.id)}): --extend-positions repeats learned positions, --chunk {most} "
                f"takes the mean of chunks, --max-length {most} cuts"
            )
        if len(skipped) > cut:
            self.progress.say(f"{count(len(skipped) - cut, 'document')} skipped: {output / SKIPPED} says why.")
        if cut:
            self.progress.say(f"{count(cut, 'document')} cut at {most:,} tokens: {output / SKIPPED} names them.")

    def _sequences(self, document: Document, tokens: int) -> list[list[int]]:
        """The token ids of a document, in chunks where it is divided."""
        try:
            sequence, _ = self.loaded.sequence(self.source.pieces(document))
        except UnreadableError:
            sequence = []
        if len(sequence) != tokens:
            raise ValueError(f"{as_shown(document.id)} was changed during the run: delete the output and start anew")
        return self.loaded.divided(sequence)

    def _choose(self, documents: Sequence[tuple[Document, int]]) -> dict[str, Any] | None:
        """The method of the run, with its settings; None for the model's own."""
        model = self.loaded.model
        if self.options.max_error is None:
            return self.options.method or exact_method(model)
        counts = [tokens for _, tokens in documents]
        self.loaded.extend(max(counts))
        lengths = [min(tokens, self.options.chunk or tokens) for tokens in counts]
        if not is_long_enough(max(lengths), model):
            return None
        tried = [
            self._sequences(*documents[index])[0]
            for index in at_quantiles(lengths, counts, TRIED_AT)
            if is_long_enough(lengths[index], model)
        ] or [self._sequences(*documents[int(np.argmax(lengths))])[0]]
        longest = max(map(len, tried))
        self.progress.say(f"Measuring the methods on {len(tried)} of the longer texts, of up to {longest:,} tokens.")
        return fastest_method(model, tried, self.options.max_error, self.progress.advance)

    def _prepare(self, chosen: dict[str, Any] | None, documents: Sequence[tuple[Document, int]]) -> None:
        """The model as the documents need it."""
        self.loaded.extend(max(tokens for _, tokens in documents))
        if chosen is None:
            if self.options.max_error is not None:
                self.progress.say("No method is faster within --max-error: exact attention.")
            return
        settings = self.loaded.patch(chosen)
        kinds = {stack.causal for stack in find_stacks(self.loaded.model)}
        error = f", error {chosen['hidden_error']:.3f}" if "hidden_error" in chosen else ""
        self.progress.say(f"Attention: {make_candidates([settings], kinds=kinds)[0].label}{error}.")

    def _embed(self, shards: Shards, batches: Sequence[Batch], documents: Sequence[tuple[Document, int]]) -> float:
        """Run the batches that have no shard yet; first some that tell how long the others will take."""
        present = shards.present()
        own, others = (
            [index for index in share if index not in present]
            for share in self.rank.shares([batch.tokens * batch.longest for batch in batches])
        )
        if not own and not others:
            return 0.0
        lengths = [min(batch.longest, self.options.chunk or batch.longest) for batch in batches]
        tokens = [batch.tokens for batch in batches]
        among = own or others
        quantiles = at_quantiles([lengths[index] for index in among], [tokens[index] for index in among], TIMED_AT)
        first, start = [among[place] for place in quantiles], time.perf_counter()
        missing = f"{len(own) + len(others):,} batches"
        longest = max(lengths[index] for index in first)
        self.progress.say(f"Timing {len(first)} of {missing}, of up to {longest:,} tokens a text.")
        timings = [
            self._timed(shards, index, batches, documents, again=number == 0) for number, index in enumerate(first)
        ]
        pace = Pace([lengths[index] for index in first], [tokens[index] for index in first], timings)
        expected = {index: pace.seconds(lengths[index], tokens[index]) for index in (*own, *others)}
        sizes = {index: len(batches[index].documents) for index in expected}
        remaining = Remaining(expected, sizes, self.rank.ranks)
        remaining.finish(shards.present())
        total, left = len(documents), remaining.documents
        where = str(self.loaded.model.device) + (f" in {self.rank.ranks} processes" if self.rank.ranks > 1 else "")
        self.progress.say(
            f"{count(total, 'document')}, {sum(tokens):,} tokens, the longest "
            f"{max(batch.longest for batch in batches):,}: {total - left:,} are done"
            + (f", the other {left:,} take about {duration(remaining.seconds)} on {where}." if left else ".")
        )
        began, listed, predicted = time.perf_counter(), time.monotonic(), 0.0
        for index in self._todo(shards, [*own, *others]):
            self._timed(shards, index, batches, documents)
            predicted += expected[index]
            remaining.finish([index])
            if self.rank.ranks > 1 and time.monotonic() - listed > LISTED_SECONDS:
                listed = time.monotonic()
                remaining.finish(shards.present())
            slower = (time.perf_counter() - began) / predicted if predicted else 1.0
            self._advance(remaining, slower, total)
        if remaining.documents:  # other ranks finished them
            remaining.finish(expected)
            self._advance(remaining, 1.0, total)
        return time.perf_counter() - start

    def _advance(self, remaining: Remaining, slower: float, total: int) -> None:
        left = duration(remaining.seconds * slower)
        self.progress.advance(total - remaining.documents, total, f"documents, about {left} left")

    def _timed(
        self,
        shards: Shards,
        index: int,
        batches: Sequence[Batch],
        documents: Sequence[tuple[Document, int]],
        again: bool = False,
    ) -> float:
        """Run a batch and keep its vectors; the seconds it took, of a second time where the first was short."""

        def run() -> np.ndarray:
            sequences = [self._sequences(*documents[number]) for number in batches[index].documents]
            return self.loaded.encoder.encode(sequences)

        device = self.loaded.model.device
        try:
            vectors, seconds = timed(run, device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise ValueError(
                f"a batch of {batches[index].tokens:,} tokens, the longest document {batches[index].longest:,}, does "
                f"not fit into memory ({str(error).splitlines()[0]}): lower --batch-tokens or --max-length, or --chunk"
            ) from None
        if again and seconds < SHORTEST_TIMING_SECONDS:  # the first call of all is slower
            _, seconds = timed(run, device)
        if not np.isfinite(vectors).all():
            row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
            name = as_shown(documents[batches[index].documents[row]][0].id)
            raise ValueError(f"the vector of {name} is not finite in {self.options.dtype}: try float32")
        shards.add(index, lambda file: np.save(file, vectors))
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
