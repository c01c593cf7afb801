"""Whole models with the kernels on a GPU: their outputs, a compiled training step, determinism."""

import copy
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_effattn import ClusterFormerConfig, ClusterFormerForMaskedLM, CSTConfig, CSTForMaskedLM, patch_attention

LENGTH, WIDTH, WORDS = 2048, 256, 1000
SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 2 * WIDTH, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def cst(**changes):
    return CSTForMaskedLM(CSTConfig(**SIZES | {"slice_length": 32, "extension_ratio": 2} | changes))


def clusterformer(**changes):
    return ClusterFormerForMaskedLM(ClusterFormerConfig(**SIZES, clusters=45, **changes))


def causal():
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return patch_attention(GPT2LMHeadModel(config), "bi-clustered", clusters=32, topk=32, min_length=0)


MODELS = {
    "CST": cst,
    "CST of three levels": partial(cst, slice_length=(16, 32)),
    "ClusterFormer": clusterformer,
    "ClusterFormer, the paper's form": partial(clusterformer, gated=False),
    "causal": causal,
}
each_model = pytest.mark.parametrize("name", MODELS)


def make(name, device, dtype):
    torch.manual_seed(0)
    return MODELS[name]().to(device, dtype)


def texts(device, length=LENGTH):
    return torch.randint(5, WORDS, (2, length), generator=torch.Generator().manual_seed(0)).to(device)


def step(model, run, ids):
    """Loss and gradients of one training step."""
    model.zero_grad(set_to_none=True)
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def distance(first, second):
    """Of the gradients of a step, all together, relative to the second."""
    assert first.keys() == second.keys()
    total = sum((first[name].float() - second[name].float()).square().sum() for name in first)
    return (total / sum(second[name].float().square().sum() for name in second)).sqrt().item()


@each_model
def test_the_kernels_give_what_the_cpu_gives(name, gpu):
    """A word between two clusters may fall into another one, which moves few words a little."""
    model = make(name, "cpu", torch.float32).eval()
    ids = texts("cpu", LENGTH // 4)
    with torch.no_grad():
        expected = model(ids).logits
        actual = copy.deepcopy(model).to(gpu)(ids.to(gpu)).logits.cpu()
    assert (actual - expected).norm() < 0.02 * expected.norm()


@each_model
def test_a_compiled_training_step_is_the_same_step(name, gpu):
    model, ids = make(name, gpu, torch.bfloat16).train(), texts(gpu)
    loss, gradients = step(model, model, ids)
    compiled_loss, compiled_gradients = step(model, torch.compile(model), ids)
    torch.testing.assert_close(compiled_loss, loss, rtol=0.01, atol=0)
    assert distance(compiled_gradients, gradients) < 0.1


@each_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains(name, dtype, gpu):
    """Autocast on a GPU takes other operations to float32 than on a CPU."""
    model = make(name, gpu, torch.float32).train()
    with torch.autocast("cuda", dtype=dtype):
        loss, gradients = step(model, model, texts(gpu))
    exact, expected = step(model, model, texts(gpu))
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    assert gradients.keys() == expected.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@each_model
def test_training_steps_repeat_when_torch_is_told_to_be_deterministic(name, gpu, deterministic):
    model, ids = make(name, gpu, torch.bfloat16).train(), texts(gpu)
    loss, gradients = step(model, model, ids)
    again, same = step(model, model, ids)
    assert torch.equal(again, loss)
    assert all(torch.equal(same[parameter], gradients[parameter]) for parameter in gradients)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "causal"])
def test_padding_changes_nothing(name, gpu):
    model, ids = make(name, gpu, torch.float32).eval(), texts(gpu)
    mask = torch.ones_like(ids)
    mask[1, LENGTH // 2 + 3 :] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits[1, : LENGTH // 2 + 3]
        alone = model(ids[1:, : LENGTH // 2 + 3]).logits[0]
    assert (padded - alone).norm() < 0.02 * alone.norm()
