"""Means of many words in half precision: their sum may be larger than the largest number."""

import pytest
import torch

from hf_effattn.models.classifying import masked_mean
from hf_effattn.models.clusterformer.modeling_clusterformer import pool
from hf_effattn.models.cst.slices import SlicePooling


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_means_of_many_words(dtype):
    """All numbers are whole, so that the mean is exact in every precision; float16 ends at 65,504."""
    words = torch.full((2, 2048, 3), 96.0, dtype=dtype)
    mask = torch.ones(2, 2048, dtype=torch.long)
    mask[1, 1500:] = 0
    words[1, 1500:] = float("inf")
    expected = torch.full((2, 3), 96.0, dtype=dtype)
    means = masked_mean(words, mask), pool(words, mask.bool(), "mean")
    whole = masked_mean(words[:1], None), pool(words[:1], None, "mean")
    for mean in (*means, *(torch.cat([mean, mean]) for mean in whole)):
        torch.testing.assert_close(mean, expected, rtol=0, atol=0)


def test_slices_of_many_words():
    from support.cst_models import tiny_config

    pooling = SlicePooling(tiny_config(max_position_embeddings=2048), 1024)
    words = torch.full((1, 2048, 3), 96.0, dtype=torch.float16)
    for mask in (None, torch.ones(1, 2048, dtype=torch.bool)):
        assert torch.equal(pooling(words, mask), torch.full((1, 2, 3), 96.0, dtype=torch.float16))


def test_a_row_without_words_is_zero():
    assert torch.equal(masked_mean(torch.ones(1, 3, 2), torch.zeros(1, 3)), torch.zeros(1, 2))
