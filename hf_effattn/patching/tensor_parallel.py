"""`parallelize`: one text on several processes, which divide its heads within attention and its tokens elsewhere.

Sizes: `B` batch, `N` tokens, `R` ranks.

The division is torch's own, by the styles of `torch.distributed.tensor.parallel`. Between the attention modules a rank
holds `N / R` tokens. Before an attention module the tokens of all ranks are gathered, and each rank projects and
attends with its own heads. The output projection adds up what the heads gave, and each rank keeps its tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from packaging.version import parse
from torch import nn
from transformers import PreTrainedModel

from .adapters import has_adapters
from .methods import METHODS
from .model_types.stacks import Stack, find_stacks
from .module_patch import RECORD, ModulePatch
from .parallel_state import SHARE, HeadShare, check_tokens_undivided, for_this_process
from .planning import not_a_model
from .transformers_internals import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=PreTrainedModel)

OLDEST_TORCH = "2.13"  # the linear layers of 2.6 take no input that is divided by tokens; those between were not tried

# Encoders whose modules have the names of BERT's, and that normalise after each residual sum.
LIKE_BERT = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text")
# By the bytes of a number, the whole number that its bits make.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
OF_HEADS = ("attention.self.query", "attention.self.key", "attention.self.value")
AFTER_HEADS = "attention.output.dense"


def parallelize(model: Model, mesh: "DeviceMesh") -> Model:
    """Divide an encoder among processes that run it on the same text together, in place.

    Each process computes its share of the heads, and holds its share of the tokens everywhere else: feed-forward
    layers, norms and what a backward pass needs of them. The weights of embeddings and attention are divided, too. The
    outputs are those of one process up to rounding, and every process gets all of them. Patch the model before or
    after. Settings of single heads follow their heads. Of Llama and other types that have a plan for it transformers
    divides the heads: `from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`, then patch.

    Every process loads the same weights first, and calls the model with the same inputs, which is checked. What a
    model returns of its middle layers is divided: `hidden_states` are `DTensor`s, except the last, and attention
    weights and `measured_error` are of this process's heads. For training seed all processes alike, as the head on top
    draws its dropout in each; on a CPU the tokens of each process then get the same dropout. Optimizers take the steps
    of one process, but `clip_grad_norm_` wants the encoder, whose gradients are `DTensor`s, and the head apart. To
    save, call `save_pretrained(folder, state_dict=weights)` with the weights that `get_model_state_dict` of
    `torch.distributed.checkpoint.state_dict` gathers.

    Args:
        model (`PreTrainedModel`): a BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE or Data2Vec text encoder,
            with or without a head, patched or not.
        mesh (`DeviceMesh`): of one dimension, whose processes share the model.

    Returns:
        The same `model`.

    Raises:
        ValueError: a torch before 2.13, another model type or a decoder, heads that do not divide evenly, a mesh of
            several dimensions, a model that is divided already, has adapters or quantised layers or was converted to
            `"cst"`, or texts that are divided by tokens. The model is then unchanged.
        TypeError: something that is not a transformers model.

    Example:
        >>> import hf_effattn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer, model = AutoTokenizer.from_pretrained("BAAI/bge-m3"), AutoModel.from_pretrained("BAAI/bge-m3")
        >>> model = hf_effattn.patch_attention(model, "bi-clustered")
        >>> model = hf_effattn.parallelize(model, init_device_mesh("cpu", (2,)))  # torchrun --nproc-per-node 2 ...
        >>> model(**tokenizer(open("long.txt").read(), return_tensors="pt")).last_hidden_state.shape[0]
        1
    """
    from torch.distributed.tensor.parallel import parallelize_module

    stack = _checked(model, mesh)
    base = stack.model.base_model
    frozen = [name for name, parameter in base.named_parameters() if not parameter.requires_grad]
    parallelize_module(base, mesh, dict(_plan(base, stack.depth, _parameters_outside(model, base))))
    base.embeddings.register_forward_pre_hook(_given_to_all(mesh, type(model).__name__), with_kwargs=True)
    for name in frozen:  # torch makes new parameters, which learn
        base.get_parameter(name).requires_grad_(False)
    share = HeadShare(mesh.get_local_rank(), mesh.size())
    for module in stack.modules:
        setattr(module, SHARE, share)
        patch: ModulePatch | None = vars(module).get(RECORD)
        if patch is not None:
            setattr(module, RECORD, replace(patch, method=for_this_process(patch.method, module)))
    return model


def _checked(model: Any, mesh: "DeviceMesh") -> Stack:
    """The stack of a model that can be divided; raises where it cannot."""
    if not isinstance(model, PreTrainedModel):
        raise not_a_model(model)
    if parse(torch.__version__) < parse(OLDEST_TORCH):
        raise ValueError(
            f"parallelize needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}: update it"
        )
    name, model_type = type(model).__name__, model.config.model_type
    if model_type not in LIKE_BERT or model.config.is_decoder:
        what = f'model type "{model_type}"' if model_type not in LIKE_BERT else "a decoder"
        raise ValueError(
            f"{name} ({what}) cannot be divided by tokens: parallelize serves encoders of the types "
            f"{', '.join(LIKE_BERT)}. To divide the heads of others load them with transformers' tp_plan"
        )
    (stack,) = find_stacks(model)
    base, heads = stack.model.base_model, model.config.num_attention_heads
    if mesh.ndim != 1:
        raise ValueError(
            f'the mesh has {mesh.ndim} dimensions, and a text is divided along one: pass that, as in mesh["tp"]'
        )
    if heads % mesh.size():
        raise ValueError(
            f"{name} has {heads} heads, which {mesh.size()} processes cannot share evenly: take a number of processes "
            f"that divides {heads}"
        )
    if any(map(is_distributed, model.parameters())):
        raise ValueError(f"{name} is divided already, by FSDP or tensor parallelism: call parallelize first, and once")
    added = next((kind.method for kind in METHODS.values() if kind.parameters_name in base._modules), None)
    if added is not None:
        raise ValueError(
            f'{name} was converted to "{added}", whose parameters cannot be divided: train it by FSDP or DDP, or '
            "divide a model with another method"
        )
    changed = sorted({type(module).__name__ for _, module in _with_parameters(base) if not _is_plain(module)})
    if changed or has_adapters(model):
        what = ", ".join(changed) or "adapters"
        raise ValueError(
            f"{name} has layers that cannot be divided ({what}): divide the model without adapters (merge them), "
            "quantised weights or layers in place of torch's own"
        )
    check_tokens_undivided(stack.modules, "parallelize")
    return stack


def _with_parameters(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of an encoder that have parameters of their own, but for a pooler's, with their paths."""
    for path, module in base.named_modules():
        if path.split(".")[0] != "pooler" and next(module.parameters(recurse=False), None) is not None:
            yield path, module


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own, with weights that are numbers in memory."""
    weights = list(module.parameters(recurse=False))
    plain = all(type(weight) is nn.Parameter and not weight.is_meta for weight in weights)
    return plain and type(module) in (nn.Linear, nn.Embedding, nn.LayerNorm)


def _parameters_outside(model: nn.Module, base: nn.Module) -> set[int]:
    """The ids of the parameters that the head of a model uses, which may be the encoder's."""
    inside = set(base.modules())
    return {
        id(parameter)
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }


def _plan(base: nn.Module, depth: int, undivided: set[int]) -> Iterator[tuple[str, Any]]:
    """How torch is to divide each module of an encoder.

    Args:
        base (`nn.Module`): the model without its head.
        depth (`int`): how many layers it has.
        undivided (`set[int]`): ids of parameters to be left whole.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, tokens = Replicate(), Shard(1)
    style: Any
    for path, module in _with_parameters(base):
        if isinstance(module, nn.Embedding) and id(module.weight) in undivided:
            style = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=tokens, use_local_output=False)
        elif isinstance(module, nn.Embedding):
            style = ColwiseParallel(output_layouts=tokens, use_local_output=False)
        elif path.endswith(OF_HEADS):
            style = ColwiseParallel()
        elif path.endswith(AFTER_HEADS):
            style = RowwiseParallel(output_layouts=tokens, use_local_output=False)
        else:
            style = SequenceParallel()  # whole weights, and this rank's tokens of the input
        yield path, style
    yield "encoder.layer.*.attention.self", PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    yield f"encoder.layer.{depth - 1}", PrepareModuleOutput(output_layouts=tokens, desired_output_layouts=whole)


def _given_to_all(mesh: "DeviceMesh", name: str) -> Any:
    """A hook of the embeddings that compares the inputs of all ranks, and divides `inputs_embeds` `(B, N, width)`.

    Args:
        mesh (`DeviceMesh`): of the ranks.
        name (`str`): of the model, for the message.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def check_and_divide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        embeds: Any = kwargs.get("inputs_embeds")
        if embeds is None:
            tokens = kwargs["input_ids"]
        else:
            tokens = embeds[..., 0].contiguous().view(BITS[embeds.element_size()])
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mine = torch.tensor([*tokens.shape, int(tokens.sum()), int((tokens * places).sum())], device=tokens.device)
        ours = [torch.empty_like(mine) for _ in range(mesh.size())]
        torch.distributed.all_gather(ours, mine, group=mesh.get_group())
        if not all(torch.equal(mine, theirs) for theirs in ours):
            raise ValueError(
                f"{name} is divided among {mesh.size()} processes, which need the same text; one has other inputs "
                "than another. Trainer, DDP and samplers give each process its own: give all of them the same batch"
            )
        if embeds is not None:
            whole = DTensor.from_local(embeds, mesh, [Replicate()], run_check=False)
            kwargs |= {"inputs_embeds": whole.redistribute(placements=[Shard(1)])}
        return args, kwargs

    return check_and_divide
