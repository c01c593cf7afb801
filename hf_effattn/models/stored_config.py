"""What the configurations of both model families share: the format that they were saved in."""

import warnings
from inspect import signature
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

FIELD = "effattn_format"
# Raised when a field is added that an older version must not overlook.
FORMAT_VERSION = 1
# What transformers stores beside the attributes of its own configuration.
OF_TRANSFORMERS = ("auto_map", "quantization_config", "torch_dtype")


class StoredConfig(PreTrainedConfig):
    """A configuration whose file says in which format it was written.

    Files without it, from before there was any, load silently. Of a newer one the fields that this version does not
    know are named in a warning; like all that transformers does not know they stay attributes and do nothing.
    """

    # Settings whose default depends on other settings.
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **kwargs: Any) -> None:
        written = kwargs.pop(FIELD, FORMAT_VERSION)
        if written > FORMAT_VERSION:
            # Called when the model's own fields are set, so what is on neither is known to nobody.
            known = {*dir(self), *dir(PreTrainedConfig()), *OF_TRANSFORMERS}
            unknown = sorted(set(kwargs) - known)
            ignored = f"and has fields that are ignored: {', '.join(unknown)}" if unknown else "with no unknown field"
            warnings.warn(
                f"this {type(self).__name__} was written by a newer hf_effattn (format {written}, this one reads up "
                f"to {FORMAT_VERSION}) {ignored}. The model may compute something else: update hf_effattn",
                stacklevel=3,
            )
        super().__init__(**kwargs)

    def _keep(self, arguments: dict[str, Any]) -> None:
        """Set every argument of `__init__`, its `locals()` at the beginning, as an attribute of its name."""
        for name, value in arguments.items():
            if name not in ("self", "kwargs", "__class__"):
                setattr(self, name, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but what replaces stored settings is checked with them, not set afterwards."""
        changes = {name: kwargs.pop(name) for name in signature(cls).parameters if name in kwargs}
        settings = cls.without_derived(config_dict, changes) if changes else config_dict
        return super().from_dict(cls.changed(settings, changes), **kwargs)

    @classmethod
    def without_derived(cls, settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """Settings without those in `DERIVED` that are but the default beside the others: they follow the changes."""
        names = (*signature(cls).parameters, "is_encoder_decoder")
        chosen = {name: settings[name] for name in names if name in settings}
        left = dict(settings)
        for name in cls.DERIVED:
            others = {other: value for other, value in chosen.items() if other != name}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                default = getattr(cls(**others).settled(), name)
            if name not in changes and name in left and left[name] == default:
                del left[name]
        return left

    def settled(self) -> Self:
        """These settings as those of a model: what its class decides is decided."""
        return self

    @classmethod
    def changed(cls, settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """Settings with changes."""
        return settings | changes

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the format."""
        return super().to_dict() | {FIELD: FORMAT_VERSION}
