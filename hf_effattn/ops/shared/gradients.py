"""Ops that `torch.library` knows, with hand-written backward passes: to `torch.compile` each pass is one op."""

import typing
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, get_args, get_origin, get_type_hints

import torch

from ..derivatives import refuse_second_derivatives
from .tables import empty_output
from .torch_internals import is_followed

NOTHING = slice(0)


def register_op(
    name: str,
    inputs: Callable[..., Any],
    forward: Callable[[Any], Any],
    gradients: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    names: Sequence[str] = ("query", "key", "value"),
    *,
    fake: Callable[[Any], Any] = lambda x: empty_output(x.query, x.value),
    outputs: int = 1,
    shown: int | None = None,
    keeps: slice = NOTHING,
    empty: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
) -> Callable[..., Any]:
    """Make a function the op `hf_effattn::<name>`, and another one its backward pass, the op `<name>_backward`.

    Args:
        name (`str`): the op's name.
        inputs (`type`): a `NamedTuple`, whose fields are the arguments of the op.
        forward (`Callable`): takes `inputs` and returns one tensor, several or a list.
        gradients (`Callable`, *optional*): takes the gradients of the outputs, then the outputs that are kept, in a
            list where the op returns a list, then `inputs`, and returns the gradients of the arguments in `names`; of
            one that is None an empty tensor, since an op cannot return None. None: nothing has a gradient.
        names (`Sequence[str]`): the arguments that have gradients.
        fake (`Callable`): what `forward` returns, without numbers. Default: of an attention's output.
        outputs (`int`): how many of the op's outputs, the first, are differentiable.
        shown (`int`, *optional*): how many of them, the first, a caller gets. Default: `outputs`.
        keeps (`slice`): which of the outputs, all tensors, are kept for the backward pass. Default: none.
        empty (`Callable`): makes a gradient's size and strides, for `torch.compile`, from its argument.

    Returns:
        `Callable`: takes the arguments, one by one, and returns the outputs that are shown.
    """
    fields, returned = get_type_hints(inputs), get_type_hints(forward)["return"]

    def run(*given: Any) -> Any:
        return forward(inputs(*given))

    run.__signature__ = _signature(fields, returned)  # type: ignore[attr-defined]
    op = torch.library.custom_op(f"hf_effattn::{name}", run, mutates_args=())
    op.register_fake(lambda *given: fake(inputs(*given)))
    schema = getattr(torch.ops.hf_effattn, name).default._schema
    listed = isinstance(schema.returns[0].type, torch.ListType)
    count = outputs if shown is None else shown

    only_shown: dict[str, Any] = {"wanted": count} if hasattr(forward, "is_recorded") else {}

    def form(*given: Any) -> Any:
        # torch takes longer to find and to call an op than the host has for a layer on a GPU.
        result = op(*given) if is_followed(given) else forward(inputs(*given), **only_shown)
        return result if returned is torch.Tensor else result[0] if count == 1 else result[:count]

    if listed:
        op.register_vmap(lambda _, in_dims, *given: _one_by_one(op, in_dims, given))
    if gradients is None:
        return form

    # hf_effattn::op(Tensor query, ...) -> Tensor
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]
    kept = ["Tensor[] outputs"] if listed else [f"Tensor output_{i}" for i in range(len(schema.returns))[keeps]]
    of_outputs = "".join(f"{argument}, " for argument in [*(f"Tensor grad_{i}" for i in range(outputs)), *kept])
    first = outputs + len(kept)
    backward_op = torch.library.custom_op(
        f"hf_effattn::{name}_backward",
        lambda *given: gradients(*given[:first], inputs(*given[first:])),
        mutates_args=(),
        schema=f"({of_outputs}{arguments}) -> ({', '.join(['Tensor'] * len(names))})",
    )
    backward_op.register_autograd(refuse_second_derivatives)

    @backward_op.register_fake
    def _(*given: Any) -> tuple[torch.Tensor, ...]:
        of_inputs = [x for x, field in zip(given[first:], fields, strict=True) if field in names]
        return tuple(given[0].new_empty(0) if x is None else empty(x) for x in of_inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        ctx.mark_non_differentiable(*tensors[outputs:])
        # With one output autograd need not make zeros, which would be as large as all that is kept.
        ctx.set_materialize_grads(outputs > 1)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs), *tensors[keeps])
        ctx.settings = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        grads = grads[0] if listed else grads
        if all(grad is None for grad in grads[:outputs]):
            return (None,) * len(fields)
        saved = ctx.saved_tensors  # read once: a checkpoint gives them only once
        pairs = zip(saved, ctx.settings, strict=False)
        given = [setting if tensor is None else tensor for tensor, setting in pairs]
        kept_outputs = saved[len(given) :]
        op_gradients = iter(backward_op(*grads[:outputs], *([list(kept_outputs)] if listed else kept_outputs), *given))
        of_inputs = [next(op_gradients) if field in names else None for field in fields]
        return tuple(None if x is None else grad for x, grad in zip(given, of_inputs, strict=True))

    op.register_autograd(backward, setup_context=setup_context)
    return form


def _signature(fields: dict[str, Any], returned: Any) -> Signature:
    """A signature from which torch makes a schema; before 2.7 it knows a list only as `typing.List`."""

    def known(kind: Any) -> Any:
        return typing.List[get_args(kind)[0]] if get_origin(kind) is list else kind  # type: ignore[misc]  # noqa: UP006

    kinds = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=known(kind)) for name, kind in fields.items()]
    return Signature(kinds, return_annotation=known(returned))


def _one_by_one(op: Callable[..., list[torch.Tensor]], in_dims: Sequence[Any], given: Sequence[Any]) -> Any:
    """What `vmap` makes of an op that returns a list, which torch has no rule for; and the dimension it is along."""
    mapped = list(zip(given, in_dims, strict=True))
    (count,) = {x.shape[dim] for x, dim in mapped if isinstance(dim, int)}
    unstacked = [op(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in mapped)) for i in range(count)]
    outputs = [torch.stack(of_each) for of_each in zip(*unstacked, strict=True)]
    return outputs, [0] * len(outputs)
