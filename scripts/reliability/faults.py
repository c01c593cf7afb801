"""Tries what can go wrong with runs and checkpoints, and whether anything half-written is ever taken for good.

Kills at random moments of a training, an embedding, a tuning and a saving, one of two processes killed, a full disk
(a limit on the size of files), truncated and flipped checkpoints, settings edited by hand, a loss that is no number.
A fault is survived where the run goes on to the bits of an unbroken one, and where what is damaged is refused in
words. Damage that a file cannot show is counted apart, as `unseen`: safetensors keeps no checksum of the weights.

    python -m scripts.reliability.faults                 # writes scripts/results/faults.json
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

import hf_effattn
from hf_effattn.cli import app
from hf_effattn.embedding.options import EmbedOptions
from hf_effattn.embedding.run import Progress, embed
from hf_effattn.training import RepeatableTrainer

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns
from ..train import clm
from ._children import Child, run
from ._tiny import save_tokenizer

TRIALS = {
    "kill: training": 20, "kill: embedding": 20, "kill: tuning": 20, "kill: saving": 20,
    "kill: one of two processes": 3,
    "full disk: training": 4, "full disk: embedding": 4, "full disk: saving": 4,
    "checkpoint cut short": 40, "bit of a checkpoint's header": 60, "bit of a checkpoint's weights": 10,
    "config edited by hand": 200, "loss that is no number": 4,
}  # fmt: skip
LONGEST = 240.0  # seconds of one run; a hang is a fault that is not survived
STEPS = 24
VERDICTS = ("survived", "unseen", "failed")


class Trials:
    """What the trials need: a folder, made once, with an unbroken run of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._numbers = folder, count()
        self.text, self.documents, self.words = folder / "text.txt", folder / "documents", folder / "words.txt"
        self.text.write_text("the cat sat on the mat and the dog sat on the cat. " * 200, encoding="utf-8")
        self.encoder = self._save_encoder()
        self._unbroken: dict[str, tuple[dict[str, str], float]] = {}
        self.finished: dict[str, Path] = {}

    def new(self) -> Path:
        """A folder that is not there yet."""
        return self.folder / f"trial-{next(self._numbers)}"

    def _save_encoder(self) -> Path:
        words = save_tokenizer(self.folder / "encoder")
        patched(0).save_pretrained(self.folder / "encoder")
        self.documents.mkdir()
        drawn = random.Random(0)
        for number in range(300):
            text = " ".join(drawn.choices(words, k=drawn.randint(1, 60)))
            (self.documents / f"{number:03d}.txt").write_text(text, encoding="utf-8")
        self.words.write_text(" ".join(drawn.choices(words, k=2000)), encoding="utf-8")
        return self.folder / "encoder"

    def train(self, output: Path, processes: int = 1) -> Callable[[], Any]:
        """A training, with dropout, that goes on where it was."""
        arguments = [
            *("--train_files", str(self.text), "--validation_files", str(self.text), "--model_type", "gpt2"),
            *("--config_overrides", "n_layer=1,n_embd=32,n_head=2"),
            *("--method", "clustered clusters=4 min_length=0"),
            *("--vocab_size", "270", "--block_length", "32", "--max_steps", str(STEPS)),
            *("--save_steps", "4", "--do_train", "--do_eval", "--use_cpu", "--report_to", "none"),
            *("--disable_tqdm", "true", "--per_device_train_batch_size", str(4 // processes)),
            *("--resume_from_checkpoint", "last", "--output_dir", str(output)),
        ]
        return lambda: clm.main(arguments)

    def embed(self, output: Path) -> Callable[[], Any]:
        """An embedding, which goes on where it was."""
        options = EmbedOptions(model=str(self.encoder), documents=self.documents, output=output, batch_tokens=64)
        progress = Progress(lambda words: None, lambda done, total, what: None)
        return lambda: str(embed(options, progress))

    def tune(self, output: Path) -> Callable[[], Any]:
        """Settings for every head of the encoder, measured on texts; it begins anew each time."""
        arguments = ["tune", str(self.encoder), "--text", str(self.words), "--lengths", "80,150", "--texts", "8"]
        return lambda: app([*arguments, "--min-length", "0", "--output", str(output)], standalone_mode=False)

    def save(self, output: Path) -> Callable[[], Any]:
        """A patched model of some 25 megabytes, saved in as many parts."""
        model = patched(0, hidden_size=256, num_hidden_layers=24)
        return lambda: model.save_pretrained(output, max_shard_size="1MB")

    def begin(self, what: str, output: Path) -> Callable[[], Any]:
        """A run of a kind."""
        begin = {"training": self.train, "embedding": self.embed, "tuning": self.tune, "saving": self.save}
        return begin[what](output)

    def unbroken(self, what: str) -> tuple[dict[str, str], float]:
        """The hashes that a run of a kind ends with, and the seconds that it takes."""
        if what not in self._unbroken:
            output, start = self.new(), time.monotonic()
            run(self.begin(what, output), self.folder / "said", LONGEST)
            self._unbroken[what] = result_of(what, output), time.monotonic() - start
            self.finished[what] = output
        return self._unbroken[what]


def patched(seed: int, **sizes: int) -> PreTrainedModel:
    """A tiny patched BERT."""
    torch.manual_seed(seed)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=42, max_position_embeddings=64, pad_token_id=0, **small | sizes)
    model = BertModel(config).eval()
    return hf_effattn.patch_attention(model, "i-clustered", clusters=3, topk=2, min_length=0)


def result_of(what: str, output: Path) -> dict[str, str]:
    """Hashes of what a finished run leaves."""
    if what == "saving":
        return {"weights": hash_of(hf_effattn.from_pretrained(AutoModel, output).state_dict())}
    if what == "tuning":
        settings = hf_effattn.Calibration.load(output).to_dict()
        for measured_in_seconds in ("speed", "environment"):
            settings["calibration"].pop(measured_in_seconds)
        return {"settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()}
    names = {"training": ("model.safetensors",), "embedding": ("vectors.npy", "ids.jsonl")}[what]
    return {name: hashlib.sha256((output / name).read_bytes()).hexdigest() for name in names}


def hash_of(weights: dict[str, torch.Tensor]) -> str:
    """Of names and values."""
    whole = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        whole.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def kill(what: str, trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """A run killed at a random moment, which then goes on; a folder that was being saved to is only loaded.

    Tuning begins anew; what it leaves is the older settings or the new ones.
    """
    expected, duration = trials.unbroken(what)
    output, moment = trials.new(), drawn.uniform(0.05, 0.95) * duration
    whole = [expected]
    if what == "tuning":  # in its place lies an older one
        shutil.copytree(trials.finished[what], output)
        file = output / "effattn.json"
        file.write_text(
            file.read_text(encoding="utf-8").replace('"max_error": 0.1,', '"max_error": 0.2,'), encoding="utf-8"
        )
        whole.append(result_of(what, output))
        assert whole[0] != whole[1]
    killed = Child(trials.begin(what, output), trials.folder / "said").kill(moment)
    left = sum(1 for path in output.rglob("*") if path.is_file()) if output.exists() else 0
    detail = f"killed with {left} files"
    if not killed:
        return "", "it had ended before"
    if what == "saving":
        return verdict_of_loading(output, expected["weights"], detail)
    if what == "tuning" and result_of(what, output) not in whole:
        return "failed", f"{detail}; neither the older settings nor the new ones"
    run(trials.begin(what, output), trials.folder / "said", LONGEST)
    return "survived" if result_of(what, output) == expected else "failed", detail


def verdict_of_loading(folder: Path, expected: str, detail: str) -> tuple[str, str]:
    """Survived where it is refused, or whole."""
    try:
        digest = hash_of(hf_effattn.from_pretrained(AutoModel, folder).state_dict())
    except Exception as error:
        return "survived", f"{detail}; refused: {type(error).__name__}"
    return "survived" if digest == expected else "failed", f"{detail}; loaded"


def full_disk(what: str, trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """No file can grow beyond some bytes; then the run goes on without that limit."""
    expected, _ = trials.unbroken(what)
    output, most = trials.new(), int(10 ** drawn.uniform(2, 4.5))

    def limited() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing is an OSError then, as on a full disk
        begin = trials.begin(what, output)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return begin()

    detail = f"files up to {most} bytes"
    try:
        run(limited, trials.folder / "said", LONGEST)
    except RuntimeError as error:
        detail += f"; {str(error)[:80]}"
    else:
        return ("survived", f"{detail} were enough") if result_of(what, output) == expected else ("failed", detail)
    if what == "saving":
        return verdict_of_loading(output, expected["weights"], detail)
    run(trials.begin(what, output), trials.folder / "said", LONGEST)
    return "survived" if result_of(what, output) == expected else "failed", detail


def as_rank(rank: int, port: int, training: Callable[[], Any]) -> Callable[[], Any]:
    """A training as one of two processes."""

    def run_rank() -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        training()
        torch.distributed.destroy_process_group()

    return run_rank


def two_processes(trials: Trials, output: Path, kill_after: float | None, killed: int) -> list[bool]:
    """Train on two; whether each ended well. One is killed after so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    training = trials.train(output, processes=2)
    both = [Child(as_rank(rank, port, training), trials.folder / f"said-{rank}") for rank in range(2)]
    if kill_after is not None:
        both[killed].kill(kill_after)
    ended = []
    for child in both:
        try:
            child.result(LONGEST)
        except RuntimeError:
            ended.append(False)
        else:
            ended.append(True)
    return ended


def kill_of_two(trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """One of two processes is killed: the other ends too, and both go on."""
    key = "two processes"
    if key not in trials._unbroken:
        output, start = trials.new(), time.monotonic()
        assert all(two_processes(trials, output, None, 0))
        trials._unbroken[key] = result_of("training", output), time.monotonic() - start
    expected, duration = trials._unbroken[key]
    output, rank = trials.new(), drawn.randrange(2)
    ended = two_processes(trials, output, drawn.uniform(0.3, 0.9) * duration, rank)
    if any(ended):
        return "", "it had ended before"
    same = all(two_processes(trials, output, None, 0)) and result_of("training", output) == expected
    return "survived" if same else "failed", f"process {rank} killed, the other ended with an error"


def damaged(trials: Trials, damage: Callable[[bytearray], str]) -> tuple[str, str]:
    """A saved model whose weights' file is changed."""
    folder = trials.new()
    shutil.copytree(trials.encoder, folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    detail = damage(content)
    file.write_bytes(content)
    before = hash_of(load_file(trials.encoder / "model.safetensors"))
    try:
        model, info = hf_effattn.from_pretrained(AutoModel, folder, output_loading_info=True)
    except Exception as error:
        return "survived", f"{detail}; refused: {type(error).__name__}"
    if hash_of(model.state_dict()) == before:
        return "survived", f"{detail}; loaded whole"
    told = sorted(name for name, keys in info.items() if keys)
    return ("survived", f"{detail}; told of: {', '.join(told)}") if told else ("unseen", detail)


def cut_short(trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """A file that ends anywhere."""

    def damage(content: bytearray) -> str:
        length = drawn.randrange(len(content))
        del content[length:]
        return f"{length} bytes left"

    return damaged(trials, damage)


def flipped(in_header: bool, trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """One bit is another."""

    def damage(content: bytearray) -> str:
        header = 8 + int.from_bytes(content[:8], "little")
        place = drawn.randrange(header) if in_header else drawn.randrange(header, len(content))
        content[place] ^= 1 << drawn.randrange(8)
        return f"byte {place}"

    return damaged(trials, damage)


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1.5, 10**30, -(10**30), float("nan"), "", "lsh", "clustered", "../x", [], [0], [[0]],
    {}, {"a": 1}, "1" * 1000,
)  # fmt: skip


def edited(trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """Some of its settings are others: they run to a finite output, or are refused by a message that names them."""
    folder = trials.new()
    shutil.copytree(trials.encoder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = drawn.sample([*sorted(config["effattn"]), "unknown"], drawn.randint(1, 2))
    edits = {name: drawn.choice(VALUES) for name in names}
    config["effattn"] |= edits
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    @torch.no_grad()
    def use() -> tuple[bool, str]:
        try:
            model = hf_effattn.from_pretrained(AutoModel, folder)
            return bool(model(torch.arange(2, 40)[None]).last_hidden_state.isfinite().all()), "ran"
        except (TypeError, ValueError) as error:
            return any(name in str(error) for name in ("config.effattn", *edits)), f"refused: {str(error)[:100]}"

    held, said = run(use, trials.folder / "said", 60.0)
    return "survived" if held else "failed", f"{json.dumps(edits)[:120]}; {said}"


def no_number(trials: Trials, drawn: random.Random) -> tuple[str, str]:
    """A step whose loss is not finite: the training ends, and goes on from what was saved before."""
    expected, _ = trials.unbroken("training")
    output, step = trials.new(), drawn.randint(2, STEPS)

    def poisoned() -> Any:
        whole, steps = RepeatableTrainer.compute_loss, count(1)

        def compute_loss(*args: Any, **settings: Any) -> Any:
            loss = whole(*args, **settings)
            is_poisoned = not settings.get("return_outputs") and next(steps) == step
            return loss * torch.nan if is_poisoned else loss

        RepeatableTrainer.compute_loss = compute_loss
        return trials.train(output)()

    try:
        run(poisoned, trials.folder / "said", LONGEST)
    except RuntimeError as error:
        if f"FloatingPointError: the loss of step {step} is nan" not in str(error):
            return "failed", str(error)[:100]
    else:
        return "failed", f"step {step}: the training ended as if nothing had been"
    finite = all(
        tensor.isfinite().all()
        for path in output.glob("checkpoint-*/model.safetensors")
        for tensor in load_file(path).values()
    )
    run(trials.train(output), trials.folder / "said", LONGEST)
    same = result_of("training", output) == expected
    return "survived" if finite and same else "failed", f"step {step}"


FAULTS: dict[str, Callable[[Trials, random.Random], tuple[str, str]]] = {
    **{f"kill: {what}": partial(kill, what) for what in ("training", "embedding", "tuning", "saving")},
    "kill: one of two processes": kill_of_two,
    **{f"full disk: {what}": partial(full_disk, what) for what in ("training", "embedding", "saving")},
    "checkpoint cut short": cut_short,
    "bit of a checkpoint's header": partial(flipped, True),
    "bit of a checkpoint's weights": partial(flipped, False),
    "config edited by hand": edited,
    "loss that is no number": no_number,
}


def verdicts(fault: str, missing: list[int], trials: Trials) -> Iterator[dict[str, Any]]:
    """A row for each trial; one whose run had ended before it was killed is drawn again."""
    for trial in missing:
        for attempt in count():
            drawn = random.Random(f"{fault} {trial} {attempt}")
            try:
                verdict, detail = FAULTS[fault](trials, drawn)
            except (RuntimeError, TimeoutError) as error:
                verdict, detail = "failed", f"{type(error).__name__}: {error}"
            if verdict:
                break
        yield {"fault": fault, "trial": trial, "verdict": verdict, "detail": detail}


def main(
    only: Annotated[str, typer.Option(help="Only faults with this in their name.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file of the results; trials in it are kept.")] = (
        RESULTS / "faults.json"
    ),
) -> None:
    kept = KeptRuns(output, {})
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for fault, times in TRIALS.items():
            missing = [n for n in range(times) if not kept.matching({"fault": fault, "trial": n})]
            for row in verdicts(fault, missing, trials) if only in fault else ():
                kept.add(row)
                print(f"{row['fault']} {row['trial'] + 1}/{times}: {row['verdict']} ({row['detail']})", flush=True)
    counts = Counter((row["fault"], row["verdict"]) for row in kept.rows)
    for (fault, verdict), number in sorted(counts.items()):
        print(f"{fault}: {number} {verdict}")
    print(f"written: {output}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
