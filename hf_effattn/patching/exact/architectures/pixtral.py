"""Pixtral's images in groups, each attended to by itself.

transformers reads all images of a call as one sequence, under a dense mask of all pairs of patches that keeps them
apart: its size, and the scores that SDPA computes, grow with the square of all patches together. A patch gives the
model the class of this file, which holds the same weights: it reads as many images together as have a small mask, and
tells its layers where each begins. Outputs differ by rounding.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.pixtral import modeling_pixtral

from ....ops.shared.graphs import is_traced
from ...module_patch import swap_class
from ...transformers_internals import remember_outputs
from ..images import IMAGES, block_diagonal

# Patches that are read together, unless one image has more: transformers' mask takes 64 MiB in float32.
GROUP = 4096


class PixtralVisionModel(modeling_pixtral.PixtralVisionModel):
    """What sees for Pixtral, patched; named as transformers' class is, for `save_pretrained` writes the name."""

    def forward(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor | list | None = None, **kwargs: Any
    ) -> tuple | BaseModelOutput:
        """The hidden states of images; where a trace is taken, by transformers' own code.

        Args:
            pixel_values (`torch.Tensor`): `(images, channels, height, width)`, padded to the largest.
            image_sizes (`torch.Tensor` or `list`, *optional*): height and width of each, in pixels. Default: all.
            kwargs: transformers' further arguments.

        Returns:
            `BaseModelOutput` or `tuple`: of transformers' class; hidden states are `(1, patches of all, hidden_size)`.
        """
        if is_traced():
            return super().forward(pixel_values, image_sizes=image_sizes, **kwargs)
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        sizes = [pixel_values.shape[2:]] * len(pixel_values) if image_sizes is None else image_sizes
        patches = [int(height // self.patch_size) * int(width // self.patch_size) for height, width in sizes]
        outputs = []
        for group in _groups(patches):
            told = {IMAGES: patches[group], "return_dict": True, **kwargs}
            outputs.append(super().forward(pixel_values[group], image_sizes=sizes[group], **told))
        merged = outputs[0] if len(outputs) == 1 else _merged(outputs)
        return merged if return_dict else merged.to_tuple()


# Under the name of its class a model remembers what can be asked of it, such as hidden states.
remember_outputs(PixtralVisionModel)


def read_apart(model: nn.Module, *, apart: bool) -> None:
    """Give what sees for Pixtral, in a model or the model itself, the class of a patch, or the one that it had."""
    exact = modeling_pixtral.PixtralVisionModel
    for part in model.modules():
        if isinstance(part, exact):
            swap_class(part, exact, PixtralVisionModel, on=apart)


def _groups(patches: list[int]) -> list[slice]:
    """Neighbouring images that are read together."""
    starts, together = [0], 0
    for image, count in enumerate(patches):
        if together and together + count > GROUP:
            starts.append(image)
            together = 0
        together += count
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(patches)], strict=True)]


def _merged(outputs: list[Any]) -> Any:
    """What several groups gave, as if they had been one."""
    return type(outputs[0])(**{name: _joined([output[name] for output in outputs]) for name in outputs[0]})


def _joined(values: list[Any]) -> Any:
    """Hidden states one behind the other, weights along a diagonal; of layers each, None where one was not kept."""
    if values[0] is None:
        return None
    if isinstance(values[0], tuple):
        return tuple(_joined(list(of_layer)) for of_layer in zip(*values, strict=True))
    return torch.cat(values, dim=1) if values[0].ndim == 3 else block_diagonal(values)
