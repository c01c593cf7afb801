"""A model as options ask for it: what turns documents into sequences of tokens, and those into vectors."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from ..measuring.environment import usable_device
from ..patching import extend_positions, patch_attention
from ..patching.stored import FIELD, read_stored
from ..samples.model import TextModel, load_text_model
from .encoder import Encoder, longest_sequence
from .options import EncodeOptions
from .pooling import pooling_of, stored_pooling
from .tokens import Tokens

# Tokens of a document that are read where neither the model nor the user names a limit; of chunked documents.
LONGEST, LONGEST_IN_CHUNKS = 65_536, 2**20


class LoadedModel:
    """A model, its tokens and its encoder; each is loaded when it is first asked for.

    Args:
        options (`EncodeOptions`): checked.
        approximates (`bool`): whether something else than the options will choose a method.
        device (`str`, *optional*): in place of the one in the options.
    """

    def __init__(self, options: EncodeOptions, *, approximates: bool = False, device: str | None = None) -> None:
        self.options, self._approximates, self._device = options, approximates, device or options.device

    @cached_property
    def _loaded(self) -> TextModel:
        device = usable_device(self._device)
        loaded = load_text_model(self.options.model, self.options.dtype)
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(loaded.model).__name__} is an encoder with a decoder: name an encoder or a decoder alone"
            )
        stored = getattr(loaded.model.config, FIELD, None)
        if stored is not None:
            settings, _ = read_stored(stored)
            is_asked_for = self.options.method is not None or self._approximates
            if settings.needs_fine_tuning and is_asked_for:
                raise ValueError(
                    f'the model is a conversion to "{settings.method}", fine-tuned as one: leave --method and '
                    "--max-error out"
                )
            if not is_asked_for:
                loaded = load_text_model(self.options.model, self.options.dtype, patched=True)
        loaded.model.to(device)
        return loaded

    @property
    def model(self) -> PreTrainedModel:
        """In eval mode, on its device."""
        return self._loaded.model

    @cached_property
    def encoder(self) -> Encoder:
        """From sequences of tokens to vectors."""
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
        """From texts to tokens, the prompt before each."""
        prompt = self.options.prompt
        return Tokens(self.encoder.tokenizer, self.encoder.pooling.document_prompt if prompt is None else prompt)

    @cached_property
    def limit(self) -> int | None:
        """The tokens that the model takes as it was loaded."""
        return longest_sequence(self.model, self.encoder.tokenizer)

    @cached_property
    def most_tokens(self) -> int:
        """The tokens of a document that are read, special ones included.

        Raises:
            ValueError: more than the model takes.
        """
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

    @property
    def cuts(self) -> bool:
        """Whether a document with more tokens than are read is cut; else it is an error."""
        options = self.options
        return bool(options.max_length or options.extend_positions or options.chunk) or self.limit is None

    def sequence(self, pieces: Iterable[str]) -> tuple[list[int], bool]:
        """The tokens of a document, and whether it has more than are read."""
        return self.tokens.sequence(pieces, self.most_tokens)

    def divided(self, sequence: list[int]) -> list[list[int]]:
        """A document's tokens in chunks, where the options name chunks."""
        return [sequence] if self.options.chunk is None else self.tokens.chunks(sequence, self.options.chunk)

    def extend(self, longest: int) -> None:
        """Repeat the model's positions up to `longest` tokens, where the options ask for it and it takes fewer."""
        if self.options.extend_positions and self.limit is not None and longest > self.limit:
            extend_positions(self.model, longest)

    def patch(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Patch the model by a method; the settings of it that were given."""
        settings = {name: value for name, value in chosen.items() if name != "hidden_error"}
        patch_attention(self.model, **settings)
        return settings
