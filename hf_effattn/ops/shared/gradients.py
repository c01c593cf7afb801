"""Ops that `torch.library` knows, with hand-written backward passes: to `torch.compile` each pass is one op."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import torch

from ..derivatives import refuse_second_derivatives
from .tables import empty_output

NOTHING = slice(0)
QKV = ("query", "key", "value")


def register_op(
    name: str,
    inputs: Callable[..., Any],
    forward: Callable[[Any], Any],
    gradients: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    names: Sequence[str] = QKV,
    *,
    fake: Callable[[Any], Any] = lambda x: empty_output(x.query, x.value),
    shown: int | None = None,
    outputs: int = 1,
    **options: Any,
) -> Callable[..., Any]:
    """Make a function the op `hf_effattn::<name>`, and another one its backward pass.

    Args:
        name (`str`): the op's name.
        inputs (`type`): a `NamedTuple`, whose fields are the arguments of the op.
        forward (`Callable`): takes `inputs` and returns one tensor, several or a list.
        gradients (`Callable`, *optional*): as of `register_gradients`, with `inputs` in place of the arguments; None:
            nothing has a gradient.
        names, outputs, options: of `register_gradients`.
        fake (`Callable`): what `forward` returns, without numbers. Default: of an attention's output.
        shown (`int`, *optional*): how many outputs, the first, a caller gets. Default: those with a gradient.

    Returns:
        `Callable`: takes the arguments, one by one, and returns the outputs that are shown.
    """

    arguments, returned = get_type_hints(inputs), get_type_hints(forward)["return"]
    kinds = [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for field, kind in arguments.items()]

    def run(*given: Any) -> Any:
        return forward(inputs(*given))

    run.__signature__ = Signature(kinds, return_annotation=returned)  # type: ignore[attr-defined]
    op = torch.library.custom_op(f"hf_effattn::{name}", run, mutates_args=())
    op.register_fake(lambda *given: fake(inputs(*given)))
    if gradients is not None:
        register_gradients(
            name,
            lambda *given: gradients(*given[: -len(kinds)], inputs(*given[-len(kinds) :])),
            names,
            outputs=outputs,
            **options,
        )
    count = outputs if shown is None else shown
    if returned is torch.Tensor:
        return op
    return lambda *given: op(*given)[0] if count == 1 else op(*given)[:count]


def register_gradients(
    op: str,
    gradients: Callable[..., tuple[torch.Tensor, ...]],
    names: Sequence[str] = QKV,
    *,
    outputs: int = 1,
    keeps: slice = NOTHING,
    empty: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
) -> None:
    """Make a function the backward pass of an op: the op `<op>_backward`, which has no derivative of its own.

    Args:
        op (`str`): the op's name; it is registered already.
        gradients (`Callable`): takes the gradients of the outputs, then the outputs that are kept, in a list where the
            op returns a list, then all arguments of the op, and returns the gradients of those in `names`; of one that
            is None an empty tensor, since an op cannot return None.
        names (`Sequence[str]`): the arguments that have gradients.
        outputs (`int`): how many of the op's outputs, the first, are differentiable.
        keeps (`slice`): which of the outputs, all tensors, are kept for the backward pass. Default: none.
        empty (`Callable`): makes a gradient's size and strides, for `torch.compile`, from its argument.
    """
    schema = getattr(torch.ops.hf_effattn, op).default._schema
    places = [argument.name in names for argument in schema.arguments]
    # hf_effattn::op(Tensor query, ...) -> Tensor
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]
    listed = isinstance(schema.returns[0].type, torch.ListType)
    kept = ["Tensor[] outputs"] if listed else [f"Tensor output_{i}" for i in range(len(schema.returns))[keeps]]
    of_outputs = "".join(f"{one}, " for one in [*(f"Tensor grad_{i}" for i in range(outputs)), *kept])
    backward_op = torch.library.custom_op(
        f"hf_effattn::{op}_backward",
        gradients,
        mutates_args=(),
        schema=f"({of_outputs}{arguments}) -> ({', '.join(['Tensor'] * len(names))})",
    )

    @backward_op.register_fake
    def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
        of_inputs = [x for x, is_named in zip(arguments[outputs + len(kept) :], places, strict=True) if is_named]
        return tuple(arguments[0].new_empty(0) if x is None else empty(x) for x in of_inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = output if isinstance(output, tuple | list) else (output,)
        ctx.mark_non_differentiable(*found[outputs:])
        # Without a second, no zeros need be made; those for what is kept would be as large as it is.
        ctx.set_materialize_grads(outputs > 1)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs), *found[keeps])
        ctx.settings = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        grads = grads[0] if listed else grads
        if all(grad is None for grad in grads[:outputs]):
            return (None,) * len(places)
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        pairs = zip(saved, ctx.settings, strict=False)
        inputs = [setting if tensor is None else tensor for tensor, setting in pairs]
        own = saved[len(ctx.settings) :]
        found = iter(backward_op(*grads[:outputs], *([list(own)] if listed else own), *inputs))
        of_inputs = [next(found) if is_named else None for is_named in places]
        return tuple(None if x is None else grad for x, grad in zip(inputs, of_inputs, strict=True))

    torch.library.register_autograd(f"hf_effattn::{op}", backward, setup_context=setup_context)
    refuse_second_derivatives(op)
