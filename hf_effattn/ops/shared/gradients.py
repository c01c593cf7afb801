"""Hand-written backward passes of ops that `torch.library` knows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .tables import empty_output

NOTHING = slice(0)


def register_attention(
    op: str,
    gradients: Callable[..., tuple[torch.Tensor, ...]],
    names: Sequence[str] = ("query", "key", "value"),
    **options: Any,
) -> None:
    """`register_gradients` for an op of query, key and value, and what its output looks like to `torch.compile`."""
    torch.library.register_fake(f"hf_effattn::{op}", lambda query, key, value, *rest: empty_output(query, value))
    register_gradients(op, gradients, names, **options)


def register_gradients(
    op: str,
    gradients: Callable[..., tuple[torch.Tensor, ...]],
    names: Sequence[str],
    *,
    outputs: int | None = None,
    keeps: slice = NOTHING,
    empty: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
) -> None:
    """Make a function the backward pass of an op: the op `<op>_backward`, which `torch.compile` keeps whole too.

    Args:
        op (`str`): the op's name; it is registered already.
        gradients (`Callable`): takes the gradients of the outputs, then the outputs that are kept, in a list where the
            op returns a list, then all arguments of the op, and returns the gradients of those in `names`; of one that
            is None an empty tensor, since an op cannot return None.
        names (`Sequence[str]`): the arguments that have gradients.
        outputs (`int`, *optional*): how many of the op's outputs, the first, are differentiable. Default: all, of a
            list 1.
        keeps (`slice`): which of the outputs, all tensors, are kept for the backward pass. Default: none.
        empty (`Callable`): makes a gradient's size and strides, for `torch.compile`, from its argument.
    """
    schema = getattr(torch.ops.hf_effattn, op).default._schema
    count = len(schema.returns) if outputs is None else outputs
    places = [argument.name in names for argument in schema.arguments]
    # hf_effattn::op(Tensor query, ...) -> Tensor
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]
    listed = isinstance(schema.returns[0].type, torch.ListType)
    kept = ["Tensor[] outputs"] if listed else [f"Tensor output_{i}" for i in range(len(schema.returns))[keeps]]
    of_outputs = "".join(f"{one}, " for one in [*(f"Tensor grad_{i}" for i in range(count)), *kept])
    backward_op = torch.library.custom_op(
        f"hf_effattn::{op}_backward",
        gradients,
        mutates_args=(),
        schema=f"({of_outputs}{arguments}) -> ({', '.join(['Tensor'] * len(names))})",
    )

    @backward_op.register_fake
    def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
        of_inputs = [x for x, is_named in zip(arguments[count + len(kept) :], places, strict=True) if is_named]
        return tuple(arguments[0].new_empty(0) if x is None else empty(x) for x in of_inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        ctx.mark_non_differentiable(*outputs[count:])
        # Without a second, no zeros need be made; those for what is kept would be as large as it is.
        ctx.set_materialize_grads(count > 1)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs), *outputs[keeps])
        ctx.settings = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        grads = grads[0] if listed else grads
        if all(grad is None for grad in grads[:count]):
            return (None,) * len(places)
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        pairs = zip(saved, ctx.settings, strict=False)
        inputs = [setting if tensor is None else tensor for tensor, setting in pairs]
        outputs = saved[len(ctx.settings) :]
        found = iter(backward_op(*grads[:count], *([list(outputs)] if listed else outputs), *inputs))
        of_inputs = [next(found) if is_named else None for is_named in places]
        return tuple(None if x is None else grad for x, grad in zip(inputs, of_inputs, strict=True))

    torch.library.register_autograd(f"hf_effattn::{op}", backward, setup_context=setup_context)
