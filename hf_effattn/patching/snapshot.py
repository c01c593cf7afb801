"""What patching changes in a model, remembered and put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .module_patch import change_class
from .stored import FIELD
from .transformers_internals import hooks_of, implementation_of, set_implementation

# Attributes and hooks of patching, and the modules that hold the parameters which a method added, begin with these.
ATTRIBUTES = "_effattn"
ADDED = "hf_effattn_"


class Snapshot:
    """Attention implementations, `config.effattn`, module patches and classes, added parameters, hooks of a model."""

    def __init__(self, model: nn.Module) -> None:
        # Submodels share configs: each config once, with the outermost model that has it, the outermost config first.
        outermost: dict[int, PreTrainedModel] = {}
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                outermost.setdefault(id(module.config), module)
        self._models = [
            (submodel, implementation_of(submodel.config), vars(submodel.config).get(FIELD))
            for submodel in outermost.values()
        ]
        # Composite models of older versions give their modules a second copy of a config.
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self._copies = [
            (config, implementation_of(config))
            for key, config in configs.items()
            if key not in outermost and implementation_of(config) is not None
        ]
        self._modules = [(module, type(module), _traces(module)) for module in model.modules()]

    @classmethod
    def of(cls, model: nn.Module) -> "Snapshot":
        """Remember a model as it is.

        Args:
            model (`nn.Module`): a transformers model, or a module around some.
        """
        return cls(model)

    def restore(self) -> None:
        """Put everything back that patching has changed since; whatever else has changed stays."""
        # Outermost first: a config hands its implementation down to those inside, whose own is then set again.
        for submodel, implementation, stored in self._models:
            if implementation_of(submodel.config) != implementation:
                set_implementation(submodel.config, implementation)
            vars(submodel.config).pop(FIELD, None)
            if stored is not None:
                setattr(submodel.config, FIELD, stored)
        for config, implementation in self._copies:
            set_implementation(config, implementation)
        for module, kind, before in self._modules:
            if type(module) is not kind and any(map(_is_ours, (type(module), kind))):
                change_class(module, kind)
            for place, earlier, now in zip(_places(module), before, _traces(module), strict=True):
                _put_back(place, earlier, now)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Whatever the block does to patches, attention implementations and train/eval modes, undo it at the end.

    Gives a function that puts back all of it but the modes.
    """
    snapshot = Snapshot.of(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield snapshot.restore
    finally:
        snapshot.restore()
        for module, training in modes:
            module.training = training


def _places(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts of a module in which patching leaves something."""
    return [vars(module), module._modules, *chain.from_iterable(hooks_of(vars(module)))]


def _is_ours(hook: Any) -> bool:
    """Whether a hook, or the class of a module, is patching's."""
    return bool(getattr(hook, "__module__", "").startswith(__package__))


def _traces(module: nn.Module) -> list[dict[Any, Any]]:
    """What patching has left on a module: of each of `_places` the entries that are its own."""
    entries: list[dict[Any, Any]] = [
        {name: value for name, value in vars(module).items() if name.startswith(ATTRIBUTES)},
        {name: child for name, child in module._modules.items() if name.startswith(ADDED)},
    ]
    for hooks, with_kwargs in hooks_of(vars(module)):
        ours = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
        entries += [ours, {key: with_kwargs[key] for key in ours if key in with_kwargs}]
    return entries


def _put_back(place: dict[Any, Any], before: dict[Any, Any], now: dict[Any, Any]) -> None:
    same = before.keys() == now.keys() and all(before[key] is now[key] for key in before)
    if not same:
        for key in now:
            del place[key]
        place.update(before)
