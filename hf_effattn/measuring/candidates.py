"""What a report compares: the methods with their settings, validated, each under a name of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..patching.methods import Method, methods_for
from ..patching.methods.exact import Exact
from ..patching.methods.per_head import PerHead
from ..settings_parsing import method_of, method_text

UNPATCHED = "unpatched"
DEFAULT_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 100},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "i-clustered", "clusters": 100, "topk": 32},
    # The least time for an error, from scripts/benchmark/other_methods.py.
    {"method": "bi-clustered", "clusters": 32, "topk": 64, "key_clusters": 32},
    {"method": "bi-clustered", "clusters": 64, "topk": 128, "key_clusters": 64},
    {"method": "bi-clustered", "clusters": 128, "topk": 128, "key_clusters": 128},
)
# The same of decoders, whose exact keys are those of a head, not of a cluster.
DECODER_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "causal": True, "clusters": 100},
    {"method": "i-clustered", "causal": True, "clusters": 25, "exact_keys": 192},
    {"method": "i-clustered", "causal": True, "clusters": 100, "exact_keys": 192},
    {"method": "bi-clustered", "causal": True, "exact_keys": 384, "key_clusters": 16},
    {"method": "bi-clustered", "causal": True, "exact_keys": 768, "key_clusters": 32},
    {"method": "bi-clustered", "causal": True, "exact_keys": 768, "key_clusters": 64},
)
BESIDE_SETTINGS = ("version", "layers", "base_model")  # of what config.effattn holds
# The settings that decide between speed and error stand in every name, others only where they differ from the default.
ALWAYS_NAMED = ("clusters", "key_clusters", "topk", "exact_keys", "slice_length", "extension_ratio")


@dataclass(frozen=True)
class Candidate:
    """One method with its settings.

    Args:
        label (`str`): the settings as a command line takes them, such as `i-clustered clusters=100 topk=32`.
        by_kind (`dict[bool, Method]`): as given, what a user who patches with them gets, `min_length` included, in an
            encoder (False), in a decoder (True), or in both.
        layers (`tuple[int, ...]`, *optional*): as of `patch_attention`; None means all.
    """

    label: str
    by_kind: dict[bool, Method]
    layers: tuple[int, ...] | None = None

    @property
    def settings(self) -> Method:
        """Those of the first kind."""
        return next(iter(self.by_kind.values()))

    @property
    def forced(self) -> Method:
        """The same with `min_length=0`, so that short inputs show the method and not SDPA."""
        return replace(self.settings, min_length=0)

    def to_dict(self) -> dict[str, Any]:
        """What `make_candidates` makes this one of."""
        layers = {} if self.layers is None else {"layers": list(self.layers)}
        return {"method": self.settings.method, **self.settings.to_dict(), **layers}


def make_candidates(
    methods: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None, *, kinds: Iterable[bool] | None = None
) -> list[Candidate]:
    """The candidates for the argument `methods` of a report.

    Args:
        methods: names, with settings or without (`"i-clustered clusters=100"`), dicts `{"method": name, **settings}`
            or what `calibrate` found, one or a sequence; a dict with `"layers"` where only some are to be patched;
            None for `DEFAULT_METHODS`.
        kinds (`Iterable[bool]`, *optional*): what the settings are for: encoders (False), decoders (True), or both.
            Default: as each dict says by `"causal"`, else encoders.

    Returns:
        `list[Candidate]`: in the order given.

    Raises:
        ValueError: none at all, the same settings twice, an unknown method or setting, a value outside its range.
        TypeError: something that is neither a name nor a dict with `"method"`.
    """
    if methods is None:
        methods = DECODER_METHODS if kinds is not None and set(kinds) == {True} else DEFAULT_METHODS
    if isinstance(methods, str | Mapping):
        methods = [methods]
    elif hasattr(methods, "to_dict"):
        methods = [methods.to_dict()]
    if not isinstance(methods, Sequence):
        raise TypeError(
            'methods must be a sequence of names or dicts such as {"method": "i-clustered", "clusters": 100}, '
            f"got {type(methods).__name__}"
        )
    if not methods:
        raise ValueError(
            "methods is empty, so there is nothing to compare with exact attention; leave it out for the default"
        )
    candidates: list[Candidate] = []
    for method in methods:
        by_kind, layers = _settings(method, kinds)
        candidate = Candidate(name_settings(next(iter(by_kind.values())), layers), by_kind, layers)
        if any(_computes(candidate) == _computes(other) for other in candidates):
            raise ValueError(f"methods holds {candidate.label} twice; give each setting once")
        candidates.append(candidate)
    return candidates


def _computes(candidate: Candidate) -> tuple[Method, tuple[int, ...] | None]:
    """What tells candidates apart; their names do not say whether CUDA graphs replay them."""
    return replace(candidate.forced, cuda_graph="never"), candidate.layers


def name_settings(settings: Method, layers: Sequence[int] | None = None) -> str:
    """The settings as a command line takes them, such as `bi-clustered clusters=32 topk=64 key_clusters=32`.

    Shown are the counts and every other setting that is not the default, without `min_length` and `cuda_graph`.
    The heads of `"per-head"` are too many to type: of them only their number of candidates and the error allowed.
    """
    defaults = type(settings)()
    shown = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in settings.unnamed
        and (field.name in ALWAYS_NAMED or getattr(settings, field.name) != getattr(defaults, field.name))
    }
    chosen = {} if layers is None else {"layers": list(layers)}
    return method_text(settings.method, shown | settings.label_parts | chosen)


def candidate_names(settings: PerHead) -> list[str]:
    """The names of what the indices in a table of heads stand for, exact attention last."""
    return [*map(name_settings, settings.candidates), Exact.method]


def _settings(method: object, kinds: Iterable[bool] | None) -> tuple[dict[bool, Method], tuple[int, ...] | None]:
    if isinstance(method, str):
        method = method_of(method)
    if hasattr(method, "to_dict"):  # what calibrate found
        method = method.to_dict()
    if not isinstance(method, Mapping) or "method" not in method:
        raise TypeError(
            'every entry of methods must be a name or a dict with the key "method", such as '
            f'{{"method": "i-clustered", "clusters": 100}}; got {method!r}'
        )
    layers = method.get("layers")
    if layers is not None and not isinstance(layers, list | tuple):
        raise TypeError(f"layers must be a list of layer indices, got {layers!r}")
    settings = {name: value for name, value in method.items() if name not in BESIDE_SETTINGS}
    by_kind = methods_for(**{"kinds": [settings.get("causal", False)] if kinds is None else kinds, **settings})
    return by_kind, None if layers is None else tuple(layers)
