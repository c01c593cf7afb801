"""Whether an attention module calls transformers' attention function, as far as the code of its forward tells."""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

# The table of attention functions, or a call of another class's forward, which may read it.
_READS_IT = frozenset({"ALL_ATTENTION_FUNCTIONS", "super", "__class__", "forward"})


def calls_attention_function(module: nn.Module) -> bool:
    """False where the forward is someone's own, and neither it nor what it calls reads transformers' functions.

    Args:
        module (`nn.Module`): of a class of transformers that does, or of a subclass.
    """
    forward = inspect.unwrap(vars(module).get("forward", type(module).forward))
    if getattr(forward, "__module__", "").startswith("transformers."):
        return True
    return _reads_it(forward, type(module), set())


def _reads_it(function: Any, kind: type, seen: set[CodeType]) -> bool:
    code = getattr(function, "__code__", None)
    if code is None:  # compiled, or an object that is called: it may
        return True
    if code in seen:
        return False
    seen.add(code)
    names = set(_names(code))
    if names & _READS_IT:
        return True
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    called = [named for name in names if (named := getattr(kind, name, function.__globals__.get(name))) is not None]
    functions = [inspect.unwrap(fn) for fn in (*cells, *called) if inspect.isroutine(fn)]
    return any(_reads_it(fn, kind, seen) for fn in functions if inspect.isfunction(fn) and not _is_of_torch(fn))


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function reads, with those of the functions inside it."""
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_of_torch(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"
