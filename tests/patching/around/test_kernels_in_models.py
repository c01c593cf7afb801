"""A patched model on the Triton kernels, on a GPU or under the interpreter: values, compiled, checkpointed."""

from importlib import import_module

import pytest
import torch
from support.tiny_models import SMALL_SETTINGS, batch_for, encoded, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

import hf_effattn
from hf_effattn.patching.methods.clustered import BiClustered

OPS = (
    *("cluster_queries", "clustered_attention", "improved_clustered_attention", "bi_clustered_attention"),
    "causal_clustered_attention",
)
SMALL = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0}
each_method = pytest.mark.parametrize("method", SMALL_SETTINGS)


@pytest.fixture
def kernels(monkeypatch):
    """The ops choose as they would on a GPU."""
    used = []

    def choose(backend, forms, *tensors):
        used.append(forms[2])
        return forms[2]

    for op in OPS:
        monkeypatch.setattr(import_module(f"hf_effattn.ops.{op}"), "choose_backend", choose)
    monkeypatch.setattr(BiClustered, "_group_on_cpu", BiClustered._group_heads)  # as on a GPU, op by op
    return used


def patched(method, dropout_p=0.0):
    model = tiny_model("bert", **SMALL, attention_probs_dropout_prob=dropout_p)
    return hf_effattn.patch_attention(model.train(), method, **SMALL_SETTINGS[method])


def output_and_gradients(model, batch):
    torch.manual_seed(5)
    model.zero_grad()
    output = encoded(model, batch)
    output.square().mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"output": output.detach()} | gradients


@pytest.mark.slow
@each_method
def test_kernels_give_what_the_form_for_a_cpu_gives(method, request):
    model = patched(method)
    batch = batch_for(model, padding="left")
    expected = output_and_gradients(model, batch)
    used = request.getfixturevalue("kernels")
    actual = output_and_gradients(model, batch)
    assert len(used) >= 2 * SMALL["num_hidden_layers"]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name


@pytest.mark.slow
@each_method
def test_checkpointing_draws_the_same_clusters_and_dropout(method, kernels):
    model = patched(method, dropout_p=0.3)
    batch = batch_for(model, padding="right")
    expected = output_and_gradients(model, batch)
    model.gradient_checkpointing_enable()
    actual = output_and_gradients(model, batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.slow
@each_method
def test_compiles_as_one_graph(method, kernels):
    model = patched(method)
    batch = batch_for(model, padding="right")
    expected = output_and_gradients(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    model.zero_grad()
    output = compiled(**batch.inputs).last_hidden_state[batch.counts]
    output.square().mean().backward()
    torch.testing.assert_close(output.detach(), expected.pop("output"))
    weights = dict(model.named_parameters())
    for name, gradient in expected.items():
        torch.testing.assert_close(weights[name].grad, gradient, msg=name)


@pytest.mark.slow
def test_a_decoder_with_dropout_learns_alike_with_and_without_checkpoints(kernels):
    """And what it says of a token depends on no later one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, attn_pdrop=0.3, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False)
    settings = {"exact_keys": 12, "segment_length": 12, "window": 5, "min_length": 0}
    model = hf_effattn.patch_attention(GPT2LMHeadModel(config).train(), "bi-clustered", **settings)
    ids = torch.randint(60, (1, 34), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)
    assert {form.__module__.rpartition(".")[2] for form in kernels} == {"causal_clustered_attention"}
    with torch.no_grad():
        before = model.eval()(ids).logits
        ids[:, 30:] = (ids[:, 30:] + 1) % 60
        after = model(ids).logits
    torch.testing.assert_close(after[:, :30], before[:, :30], rtol=0, atol=0)
    assert not torch.equal(after[:, 30], before[:, 30])
