"""What transformers' own tests and Trainer ask of a model, of ClusterFormer."""

import pytest
import torch
import torch.nn.functional as F
from support.clusterformer_cases import HEADS, texts, tiny_model
from transformers import AutoModel

from hf_effattn.models.clusterformer import (
    ClusterFormerForCausalLM,
    ClusterFormerForConditionalGeneration,
    ClusterFormerModel,
)


@pytest.mark.parametrize("with_labels", [True, False])
def test_the_loss_takes_labels_that_were_shifted_before(with_labels):
    """Under sequence and context parallelism the label of a part's last word lies in the next part."""
    model = tiny_model(ClusterFormerForCausalLM, gated=False)
    words, shifted = texts(), texts(seed=5)
    shifted[0, 3] = -100
    output = model(words, labels=words if with_labels else None, shift_labels=shifted)
    expected = F.cross_entropy(output.logits.flatten(0, 1), shifted.flatten())
    torch.testing.assert_close(output.task_loss, expected)
    assert output.cluster_loss is not None
    own = F.pad(words[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(words, shift_labels=own).loss, model(words, labels=words).loss)


@pytest.mark.parametrize("head", [head for auto, head in HEADS.items() if auto is not AutoModel])
def test_heads_load_the_weights_of_a_base_model(head, tmp_path):
    """The encoder of a translation model stayed random."""
    base = tiny_model(ClusterFormerModel, dtype=torch.float32, seed=7)
    base.save_pretrained(tmp_path)
    model, info = head.from_pretrained(tmp_path, output_loading_info=True)
    assert model.base_model is not model
    loaded = model.base_model.state_dict()
    for name, weight in base.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(loaded[name], weight), name
    prefix = f"{model.base_model_prefix}."
    assert not [name for name in info["missing_keys"] if name.startswith(prefix)]


@pytest.mark.parametrize("head", [head for auto, head in HEADS.items() if auto is not AutoModel])
def test_a_base_model_loads_the_weights_of_a_head(head, tmp_path):
    model = tiny_model(head, dtype=torch.float32, seed=7)
    if head is ClusterFormerForConditionalGeneration:  # its config is of two models
        model = model.encoder
    model.save_pretrained(tmp_path)
    base, info = ClusterFormerModel.from_pretrained(tmp_path, output_loading_info=True)
    assert {name for name in info["missing_keys"] if "pooler" not in name} == set()
    assert torch.equal(base(texts())[0], model.base_model(texts())[0])


def test_a_saved_translation_model_has_the_names_it_had(tmp_path):
    """Nothing is put before, or taken from, the names of the encoder."""
    model = tiny_model(ClusterFormerForConditionalGeneration, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
