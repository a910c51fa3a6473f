"""Rows of config.json for what may differ between layers: sliding windows, rotary embedding (both spellings), mixtures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.attention import Rope, RopeScaling
from configs.knobs import nearest
from configs.load import UserError
from configs.model import Model
from models.huggingface.keys import LAYERS, Config, Knobs, Row, knobs_of
from models.huggingface.windows import FULL, SLIDING, WINDOWS, windows


@dataclass(frozen=True)
class Scaling:
    """A row of SCALINGS: its keys and our knobs of rope.scaling, and the keys that must be there."""

    kind: str
    keys: dict[str, str]
    needed: tuple[str, ...] = ("factor",)


FACTOR, ORIGINAL = {"factor": "factor"}, {"original_max_position_embeddings": "original"}
SCALINGS: dict[str, Scaling] = {
    "default": Scaling("none", {}, ()),
    "linear": Scaling("linear", FACTOR),
    "dynamic": Scaling("dynamic", FACTOR),
    "yarn": Scaling("yarn", FACTOR | ORIGINAL | {key: key for key in (
        "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")}, ()),
    "llama3": Scaling("llama3", FACTOR | ORIGINAL | {"low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"},
                      ("factor", "low_freq_factor", "high_freq_factor")),
    "longrope": Scaling("longrope", FACTOR | ORIGINAL | {
        "short_factor": "short", "long_factor": "long", "attention_factor": "attention_factor"}, ("short_factor", "long_factor")),
}
"""By rope_type."""

ALIASES = {"su": "longrope"}
KEYS = ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
        "partial_rotary_factor")


def positions(of: str | None = None, *, partly: bool = False, theta: float = 10_000.0, local_theta: float | None = None) -> Row:
    """Windows and rotary embedding of each layer.

    `of`: a row of WINDOWS; `partly`: a part of a head may rotate; `theta`: what the reference library takes where the config has none;
    `local_theta`: the same for sliding layers that have a rotary embedding of their own (Gemma 3).
    """
    own = () if local_theta is None else ("rope_local_base_freq",)

    def read(config: Config) -> Knobs:
        types, width = windows(WINDOWS[of], config)
        share = partial(config) if partly else whole(config)

        def knobs(kind: str) -> Knobs:
            local = local_theta is not None and kind == SLIDING
            found = rope(config, None if local_theta is None else kind, local_theta if local else theta)
            return found | {"rope.fraction": share, "attention.window": width if kind == SLIDING else None}

        of_type = {kind: knobs(kind) for kind in dict.fromkeys(types)}
        return {LAYERS: [of_type[kind] for kind in types], "context": config.get("max_position_embeddings")}

    def write(model: Model) -> Config:
        layers = model.layers
        types = [FULL if layer.attention.window is None else SLIDING for layer in layers]
        width = min({layer.attention.window for layer in layers} - {None}, default=None)
        ropes = {kind: layer.rope for kind, layer in zip(types, layers, strict=True)}
        one, longest = layers[0].rope, longest_of(model.context, layers[0].rope.scaling)
        written = {kind: rope_keys(ropes.get(kind, one), partly) for kind in (FULL, SLIDING)}
        keys = {"max_position_embeddings": longest, **WINDOWS[of].write(types, width, longest)}
        if one.scaling.kind == "longrope":  # Phi-3 reads it here
            keys["original_max_position_embeddings"] = one.scaling.original
        return keys | {"rope_parameters": written if local_theta is not None else rope_keys(one, partly)}

    return Row((*KEYS, *WINDOWS[of].keys, *own, *(("rotary_dim",) if partly else ())), read, write)


def longest_of(context: int | None, scaling: RopeScaling) -> int:
    """What max_position_embeddings says: the context, or what the rotary embedding is stretched to."""
    if scaling.kind == "dynamic":
        return scaling.original
    return context or round((scaling.original or 2048) * scaling.factor)


def agreed(what: str, *given: Any, default: Any = None) -> Any:
    """The one value among those that are given. Raises UserError where two differ."""
    values = dict.fromkeys(value for value in given if value is not None)
    if len(values) > 1:
        raise UserError(f"config.json: gives {what} twice, as {' and as '.join(map(repr, values))}")
    return next(iter(values), default)


def section(config: Config, key: str) -> Config | None:
    """The keys inside a key, or None. Raises UserError where it holds something else."""
    if not isinstance(config.get(key), Mapping | None):
        raise UserError(f"config.json: {key} = {config[key]!r} is not supported: it must hold keys of its own, or null")
    return config.get(key)


def rope(config: Config, kind: str | None, theta: float) -> Knobs:
    """The rotary knobs of a type of layer (None: of all), from `rope_parameters` or from the older keys."""
    new, old, base = section(config, "rope_parameters"), section(config, "rope_scaling"), config.get("rope_theta")
    if new is not None and old is not None:
        raise UserError("config.json: has both rope_parameters and rope_scaling; one of them must go")
    if kind == SLIDING:
        old, base = None, config.get("rope_local_base_freq")
    settings = dict(old or {} if new is None else new if kind is None else new[kind])
    if kind is None:
        settings.pop("partial_rotary_factor", None)  # see `partial`
    names = [settings.pop(key, None) for key in ("rope_type", "type")]
    name = agreed("the rope type", *(ALIASES.get(name, name) for name in names), default="default")
    if name not in SCALINGS:
        raise UserError(f"config.json: rope type {name!r} is not supported; {nearest(str(name), SCALINGS)}")
    row = SCALINGS[name]
    base = agreed("rope_theta", settings.pop("rope_theta", None), base, default=theta)
    if unknown := settings.keys() - row.keys.keys():
        raise UserError(f"config.json: {min(unknown)!r} is not known for rope type {name!r}; known are {', '.join(row.keys) or 'none'}")
    for key in row.needed:
        if settings.get(key) is None:
            raise UserError(f"config.json: rope type {name!r} has no {key!r}, which it needs")
    found = {knob: settings[key] for key, knob in row.keys.items() if settings.get(key) is not None}
    scaling = {"kind": row.kind, **completed(name, found, config)}
    return {"rope.theta": float(base), **{f"rope.scaling.{knob}": value for knob, value in scaling.items()}}


def partial(config: Config) -> float:
    """The share of a head's width that rotates."""
    turned = config["rotary_dim"] / config["head_dim"] if config.get("rotary_dim") is not None else None
    in_rope = [(section(config, key) or {}).get("partial_rotary_factor") for key in ("rope_parameters", "rope_scaling")]
    return agreed("partial_rotary_factor", turned, config.get("partial_rotary_factor"), *in_rope, default=1.0)


def whole(config: Config) -> float:
    """The share where a family rotates whole heads. Raises UserError for another."""
    if partial(config) != 1:
        raise UserError(f"config.json: partial_rotary_factor = {partial(config)} is not supported for {config['model_type']}")
    return 1.0


def completed(name: str, found: dict[str, Any], config: Config) -> dict[str, Any]:
    """A scaling's knobs with what the reference library takes from the rest of the config."""
    longest = config.get("max_position_embeddings")
    if name == "dynamic":
        found["original"] = longest
    if name in ("yarn", "llama3", "longrope"):
        stated = agreed("original_max_position_embeddings", found.get("original"), config.get("original_max_position_embeddings"))
        found["original"] = stated or longest
    if name in ("yarn", "longrope"):
        found.setdefault("factor", config["max_position_embeddings"] / found["original"])
    if name == "longrope":
        found |= {knob: tuple(map(float, found[knob])) for knob in ("short", "long")}
    if not (found.get("mscale") and found.get("mscale_all_dim")):  # the reference library takes both or neither
        found.pop("mscale", None), found.pop("mscale_all_dim", None)
    return found


def rope_keys(of: Rope, partly: bool) -> dict[str, Any]:
    """The `rope_parameters` of a layer, as far as they can be written."""
    name = next((name for name, row in SCALINGS.items() if row.kind == of.scaling.kind), None)
    if of.theta is None or name is None:
        return {}
    values = {key: getattr(of.scaling, knob) for key, knob in SCALINGS[name].keys.items()}
    written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None}
    share = {"partial_rotary_factor": of.fraction} if partly and of.fraction != 1 else {}
    return {"rope_type": name, "rope_theta": of.theta, **share, **written}


def dense_layers() -> Row:
    """Layers of a Qwen 3 mixture that are dense: those named, and all but every n-th."""

    def read(config: Config) -> Knobs:
        depth, step, dense = config["num_hidden_layers"], config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        experts = agreed("the number of experts", config.get("num_experts"), config.get("num_local_experts"))
        if experts is None:
            raise UserError("config.json: has no 'num_experts', which sets moe.experts")
        mixed = [layer not in dense and (layer + 1) % step == 0 for layer in range(depth)]
        return {LAYERS: [{"moe.experts": experts if there else None} for there in mixed]}

    def write(model: Model) -> Config:
        experts = [layer.moe.experts for layer in model.layers]
        dense = [index for index, number in enumerate(experts) if number is None]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense, "num_experts": max(number or 0 for number in experts)}

    return Row(("decoder_sparse_step", "mlp_only_layers", "num_experts", "num_local_experts"), read, write)


def experts_of(key: str, other: str) -> Row:
    """The number of experts under one of two spellings; the first is written."""

    def read(config: Config) -> Knobs:
        found = agreed("the number of experts", config.get(key), config.get(other))
        if found is None:
            raise UserError(f"config.json: has no {key!r}, which sets moe.experts")
        return {"moe.experts": found}

    return Row((key, other), read, lambda model: {key: knobs_of(model)["moe.experts"]})
