"""Conversion of a pretrained model to the attention of the Composite Slice Transformer, as a method of patching.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `D` head_dim of query and key, `Dv` of value.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ....ops.shared.graphs import in_a_graph
from ....ops.slice_attention import extension_tokens
from ...model_types.stacks import Stack, longest_input
from ...module_patch import RECORD, ModulePatch
from ..base import Groups, Method, Options
from .attention import (
    NO_TERMS,
    Projected,
    Slicing,
    Terms,
    merged_attention,
    merged_over_cache,
    summed_attention,
    take_rows,
    tokens_first,
)
from .checkpoint import load_positions, quiet_about_tables
from .positions import (
    NAME,
    PROJECTIONS,
    SlicePositions,
    attach,
    detach,
    grow_slices,
    held_by,
    plain_tables,
    positions_for,
    project,
)

COMPOSITIONS = ("merged", "local-global")


@dataclass(frozen=True, kw_only=True)
class CompositeSlices(Method):
    """Composite slice attention: a slice's own tokens exactly, the rest of the input by its slices (Lee 2023).

    A conversion: it adds trainable position embeddings, which begin at 0, and is meant to be fine-tuned.

    Args:
        slice_length (`int`): tokens of a slice.
        extension_ratio (`float`): reach of a slice's keys in slice lengths, from 1 (no neighbours) to 3 (both whole;
            of models that mask the future, the one before).
        composition (`str`): `"merged"`: one softmax over the slice's tokens and the means of all other slices, which
            stays close to the pretrained attention; or `"local-global"`: the paper's sum of two attentions, which
            keeps little of it and has to be trained at length.
        attend_ends (`bool`, *optional*): whether every slice sees the first and, unless the future is masked, the last
            token of the text ([CLS], [SEP]). Default: in the merged composition.
        min_length (`int`): inputs shorter than this many tokens, padding included, run exact attention. Default: none,
            since a converted model is trained for what it runs. Over a static cache a compiled step counts its size.
    """

    method: ClassVar[str] = "cst"
    summary: ClassVar[str] = "the tokens of a slice attend to each other exactly, and to other slices by their means"
    needs_fine_tuning: ClassVar[bool] = True
    parameters_name: ClassVar[str] = NAME
    purpose: ClassVar[dict[str, str]] = {
        **Method.purpose,
        "min_length": "inputs with fewer tokens run exact attention",
        "slice_length": "the tokens of a slice; more are more exact and slower",
        "extension_ratio": "the reach of a slice's keys, from 1 for no neighbour to 3 for both",
        "composition": "how the attention in slices and among them are put together, merged or local-global",
        "attend_ends": "whether every slice sees the first and the last token of the text; None: if merged",
    }

    slice_length: int = 16
    extension_ratio: float = 1.0
    composition: str = "merged"
    attend_ends: bool | None = None
    min_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("min_length", minimum=0)
        self._check_int("slice_length", minimum=1)
        extension_tokens(self.slice_length, self.extension_ratio)
        self._check_choice("composition", COMPOSITIONS)
        if self.attend_ends is not None and not isinstance(self.attend_ends, bool):
            purpose = self.purpose["attend_ends"]
            raise TypeError(f"attend_ends must be True, False or None, got {self.attend_ends!r}: {purpose}")
        object.__setattr__(self, "extension_ratio", float(self.extension_ratio))
        if self.attend_ends is None:
            object.__setattr__(self, "attend_ends", self.composition == "merged")

    def shortest_length(self, device_type: str) -> int:
        return self.min_length

    def check_stack(self, stack: Stack) -> None:
        """Raise where a model's projections are not known, or where it takes no input of more than one slice."""
        config: Any = stack.model.config
        name = type(stack.model).__name__
        if config.model_type not in PROJECTIONS:
            raise ValueError(
                f'"{self.method}" does not know where {name} (model type "{config.model_type}") projects its queries '
                f"and keys, which its position embeddings go through; it converts {', '.join(PROJECTIONS)}"
            )
        longest = longest_input(config)
        if longest is not None and self.slice_length >= longest:
            raise ValueError(
                f"slice_length is {self.slice_length}, but {name} takes {longest} tokens at most, so no input would "
                "have two slices; choose fewer, or call hf_effattn.extend_positions first"
            )

    def parameters_for(self, stack: Stack) -> SlicePositions:
        """The position tables: those that the stack holds, where they are of the right sizes, or new ones."""
        extension = extension_tokens(self.slice_length, self.extension_ratio)
        return positions_for(stack, self.slice_length + 2 * extension, self.slice_length)

    def attach(self, model: nn.Module, parameters: nn.Module | None) -> None:
        attach(model, parameters)

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        detach(model)

    @classmethod
    def lost_by(cls, stack: Stack, method: Method, parameters: nn.Module | None, saved: bool) -> str | None:
        held, name = held_by(stack.model), type(stack.model).__name__
        if held is not None and held is not parameters and held.is_trained:
            new = f'"{method.method}" has none'
            if isinstance(method, cls):
                new = "this conversion has other slices, whose positions begin at 0"
            return (
                f"the trained position tables ({NAME}) that {name} was converted with are left out: {new}. Keep its "
                "slice_length and extension_ratio to keep them, or load the saved model anew with "
                "hf_effattn.from_pretrained to have them back"
            )
        if held is None and saved:
            return (
                f"{name} was saved as a conversion, and is without the position tables ({NAME}) that it was trained "
                "with: transformers' own from_pretrained leaves them out. Load it with hf_effattn.from_pretrained to "
                "have them"
            )
        return None

    @classmethod
    def while_loading(cls) -> AbstractContextManager[None]:
        return quiet_about_tables()

    def from_checkpoint(self, model: nn.Module, stack: Stack, name_or_path: Any, options: Mapping[str, Any]) -> None:
        load_positions(model, stack, name_or_path, options)

    @classmethod
    def plan_extension(cls, model: nn.Module, present: int, rows: int) -> Callable[[], None] | None:
        tables = plain_tables(model)
        if tables is None:
            return None
        patches = (vars(module).get(RECORD) for module in model.modules())
        method = next(patch.method for patch in patches if patch is not None and patch.method is not None)
        return partial(grow_slices, tables, -(-present // method.slice_length), -(-rows // method.slice_length))

    def graph_key(self, options: Options) -> Hashable | None:
        """None where the layer's own weights are read."""
        patch: ModulePatch | None = getattr(options.module, RECORD, None)
        if self.composition != "merged" or (patch is not None and options.positions is None):
            return None
        return () if patch is None else (patch.method, patch.owner is None)

    def check_weights(self) -> None:
        if self.composition != "merged":
            raise ValueError(
                f'composition="{self.composition}" projects what the slices attended to once more, by the layer\'s '
                "own weights: it is no matrix of weights on the tokens' values, and none can be shown"
            )

    def attend_over_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor | None:
        M = key.shape[2] if self.min_length == 0 else _length_so_far(key, mask)
        if self.is_exact(M, query.device.type):
            return None
        if self.composition != "merged":
            raise ValueError(
                f'composition="{self.composition}" needs the queries of earlier tokens too, which a cache of keys and '
                "values does not hold: generate with use_cache=False"
            )
        visible = None if mask is None else mask[:, 0].expand(query.shape[0], -1, -1)
        return merged_over_cache(query, key, value, visible, self._slicing(query, key, None, options, fill=True))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        groups: Groups = (),
    ) -> torch.Tensor:
        """Slices are counted from each text's first token, wherever its padding is."""
        key_mask, module = options.key_mask, options.module
        order = None if key_mask is None else tokens_first(key_mask)
        if order is not None and key_mask is not None:
            query, key, value = (take_rows(rows, order) for rows in (query, key, value))
            key_mask = key_mask.gather(1, order)
        composed: Callable[..., torch.Tensor] = merged_attention
        if self.composition != "merged":
            if module is None:
                raise ValueError(
                    f'composition="{self.composition}" needs the attention module, by whose weights it projects'
                )
            composed = partial(summed_attention, project=partial(_project_again, module, query))
        output = composed(query, key, value, how=self._slicing(query, key, key_mask, options))
        return output if order is None else take_rows(output, order.argsort(dim=1))

    attend_causal = attend

    def _slicing(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        key_mask: torch.Tensor | None,
        options: Options,
        *,
        fill: bool = False,
    ) -> Slicing:
        local_terms, slice_terms = self._terms(query, key, options, fill=fill)
        return Slicing(
            slice_length=self.slice_length,
            extension_ratio=self.extension_ratio,
            causal=options.causal,
            attend_ends=bool(self.attend_ends),
            key_mask=key_mask,
            scale=options.scale,
            dropout_p=options.dropout_p,
            local_terms=local_terms,
            slice_terms=slice_terms,
        )

    def _terms(
        self, query: torch.Tensor, key: torch.Tensor, options: Options, *, fill: bool = False
    ) -> tuple[Terms, Terms]:
        """The position terms of queries and keys: in a slice, `(..., L, D)` and `(..., αL, D)`, and of slices.

        Args:
            query (`torch.Tensor`): `(B, H, N, D)`.
            key (`torch.Tensor`): `(B, H, M, D)`.
            options (`Options`): with what the layer projected of its tables, if it is converted.
            fill (`bool`): whether slices behind the table get 0, because they are empty.

        Raises:
            ValueError: more slices than the table has; a converted layer that was not called as a module.
        """
        patch: ModulePatch | None = getattr(options.module, RECORD, None)
        # A module that is not converted, or with other slices, as a report compares them, has no positions for these.
        other = None if patch is None else patch.method
        if patch is None or patch.owner is None or not isinstance(other, CompositeSlices) or not query.shape[0]:
            return NO_TERMS, NO_TERMS
        if (other.slice_length, other.extension_ratio) != (self.slice_length, self.extension_ratio):
            return NO_TERMS, NO_TERMS
        if options.positions is None:
            if held_by(patch.owner) is None:
                return NO_TERMS, NO_TERMS
            raise ValueError(
                f"{type(options.module).__name__} attends without its {NAME}, which its hooks add: it was called past "
                f'them, or has lost them. Call the module itself, or patch_attention(model, "{self.method}", ...) anew'
            )
        of_query, of_key = options.positions
        extension = extension_tokens(self.slice_length, self.extension_ratio)
        window, slices = self.slice_length + 2 * extension, -(-key.shape[2] // self.slice_length)
        known = of_key.shape[-2] - window
        if slices > known and not fill:
            raise ValueError(
                f"{query.shape[2]} tokens are {slices} slices of {self.slice_length}, but the model was converted for "
                f"{known}: call hf_effattn.extend_positions, or truncate the input"
            )
        local = of_query[..., extension : extension + self.slice_length, :], of_key[..., :window, :]
        query_terms, key_terms = (terms[..., window : window + slices, :] for terms in options.positions)
        if slices > known:
            empty = (0, 0, 0, slices - known)
            query_terms, key_terms = F.pad(query_terms, empty), F.pad(key_terms, empty)
        return local, (query_terms, key_terms)


def _project_again(module: nn.Module, query: torch.Tensor, slices: torch.Tensor) -> Projected:
    """Queries, keys and values `(B, H, S, D)` of slice embeddings, by the layer's own weights."""
    heads = query.shape[1:2] + query.shape[3:]
    queries, keys, values = (
        rows.to(query.dtype).unflatten(-1, heads).transpose(1, 2) for rows in project(module, slices)
    )
    return queries, keys, values


def _length_so_far(key: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Tokens, and padding before them, up to the last query; a static cache has empty rows behind those.

    A graph cannot ask for it, and takes the size of the cache.
    """
    if mask is None or in_a_graph():
        return key.shape[2]
    rows = torch.arange(1, key.shape[2] + 1, device=mask.device)
    return int((rows * mask).amax())
