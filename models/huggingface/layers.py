"""Rows of config.json for what may differ between layers: sliding windows, rotary embedding (both spellings), mixtures."""

from collections.abc import Callable, Mapping
from typing import Any

from configs.attention import Rope
from configs.knobs import nearest
from configs.load import UserError
from configs.model import Model
from models.huggingface.keys import LAYERS, Config, Knobs, Row

FULL, SLIDING = "full_attention", "sliding_attention"

SCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic", {"factor": "factor"}),
    "yarn": ("yarn", {"factor": "factor", "original_max_position_embeddings": "original", "truncate": "truncate"} | {
        key: key for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")}),
    "llama3": ("llama3", {"factor": "factor", "original_max_position_embeddings": "original", "low_freq_factor": "low_frequency",
                          "high_freq_factor": "high_frequency"}),
    "longrope": ("longrope", {"factor": "factor", "original_max_position_embeddings": "original", "short_factor": "short",
                              "long_factor": "long", "attention_factor": "attention_factor"}),
}
"""rope_type to the kind of our scaling, and its keys to the knobs of rope.scaling."""

ALIASES = {"su": "longrope"}
KEYS = ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
        "partial_rotary_factor", "rotary_dim", "rope_local_base_freq")
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
               "_sliding_window_pattern")


def positions(*, windows: bool = False, default: Callable[[int], str] | None = None, local_rope: bool = False, partly: bool = False,
              theta: float = 10_000.0) -> Row:
    """Windows and rotary embedding of each layer.

    `windows`: the family has sliding windows; `default`: the type of layer i where `layer_types` is absent (None: sliding where there is a
    window); `local_rope`: sliding layers have a rotary embedding of their own (Gemma 3); `partly`: a part of a head may rotate; `theta`:
    what the reference library takes where the config has none.
    """

    def read(config: Config) -> Knobs:
        types = layer_types(config, default)
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if not partly and partial(config) != 1:
            raise UserError(f"config.json: partial_rotary_factor = {partial(config)} is not supported for {config['model_type']}")
        of_type = {kind: rope(config, kind if local_rope else None, theta) | {"attention.window": window if kind == SLIDING else None}
                   for kind in dict.fromkeys(types)}
        return {LAYERS: [of_type[kind] for kind in types], "context": config.get("max_position_embeddings")}

    def write(model: Model) -> Config:
        types = [FULL if layer.attention.window is None else SLIDING for layer in model.layers]
        widths = {layer.attention.window for layer in model.layers} - {None}
        ropes = {kind: rope_keys(layer.rope, model) for kind, layer in zip(types, model.layers, strict=True)}
        one = ropes.get(SLIDING, ropes.get(FULL))
        longest = model.context or round((model.layers[0].rope.scaling.original or 2048) * model.layers[0].rope.scaling.factor)
        keys = {"max_position_embeddings": longest,
                "rope_parameters": {kind: ropes.get(kind, one) for kind in (FULL, SLIDING)} if local_rope else one}
        if windows:
            keys["sliding_window"] = min(widths, default=None)
        return keys | ({"layer_types": types} if default is not None else {})

    return Row((*KEYS, *(WINDOW_KEYS if windows else ())), read, write)


def layer_types(config: Config, default: Callable[[int], str] | None) -> list[str]:
    """The type of each layer."""
    depth = config["num_hidden_layers"]
    if config.get("layer_types") is not None:
        types = list(config["layer_types"])
        if len(types) != depth or set(types) - {FULL, SLIDING}:
            raise UserError(f"config.json: layer_types = {types} is not supported: {depth} of {FULL!r} and {SLIDING!r} are known")
        return types
    if default is None:
        sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        return [SLIDING if sliding and layer >= first else FULL for layer in range(depth)]
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    return [default(layer) if period is None else (SLIDING if (layer + 1) % period else FULL) for layer in range(depth)]


def rope(config: Config, kind: str | None, theta: float) -> Knobs:
    """The rotary knobs of a type of layer, from `rope_parameters` or the older keys."""
    settings = config.get("rope_parameters")
    if settings is None:
        settings = {"rope_theta": config.get("rope_theta", theta), **(config.get("rope_scaling") or {"rope_type": "default"})}
        if kind == SLIDING:
            settings = {"rope_theta": config.get("rope_local_base_freq", theta), "rope_type": "default"}
    elif kind is not None and kind in settings:
        settings = settings[kind]
    settings = dict(settings)
    settings.setdefault("partial_rotary_factor", partial(config))
    name = settings.pop("rope_type", None) or settings.pop("type", "default")
    settings.pop("type", None)
    name = ALIASES.get(name, name)
    if name not in SCALINGS:
        raise UserError(f"config.json: rope type {name!r} is not supported; {nearest(name, SCALINGS)}")
    ours, keys = SCALINGS[name]
    knobs = {"rope.theta": float(settings.pop("rope_theta", theta)), "rope.fraction": settings.pop("partial_rotary_factor"),
             "rope.scaling.kind": ours}
    if unknown := settings.keys() - keys.keys() - {"original_max_position_embeddings"}:
        raise UserError(f"config.json: {min(unknown)!r} is not known for rope type {name!r}; known are {', '.join(keys)}")
    found = {knob: settings[key] for key, knob in keys.items() if settings.get(key) is not None}
    return knobs | {f"rope.scaling.{knob}": value for knob, value in completed(name, found, config).items()}


def partial(config: Config) -> float:
    """The share of a head's width that rotates."""
    if "rotary_dim" in config:
        return config["rotary_dim"] / config["head_dim"]
    return config.get("partial_rotary_factor", (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))


def completed(name: str, found: dict[str, Any], config: Config) -> dict[str, Any]:
    """A scaling's knobs with what the reference library takes from the rest of the config."""
    longest, original = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
    if name == "dynamic":
        found["original"] = longest
    if name == "longrope":
        found["original"] = original or found["original"]
        found["factor"] = longest / original if original else found.get("factor", longest / found["original"])
        found |= {key: tuple(map(float, found[key])) for key in ("short", "long")}
    if name in ("yarn", "llama3"):
        found.setdefault("original", longest)
    if not (found.get("mscale") and found.get("mscale_all_dim")):  # the reference library takes both or neither
        found.pop("mscale", None), found.pop("mscale_all_dim", None)
    return found


def rope_keys(of: Rope, model: Model) -> dict[str, Any]:
    """The `rope_parameters` of a layer."""
    theirs = {ours: (name, keys) for name, (ours, keys) in SCALINGS.items()}
    if of.theta is None or of.scaling.kind not in theirs:
        return {}
    name, keys = theirs[of.scaling.kind]
    values = {key: getattr(of.scaling, knob) for key, knob in keys.items()}
    written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None}
    share = {} if of.fraction == 1 else {"partial_rotary_factor": of.fraction}
    return {"rope_type": name, "rope_theta": of.theta, **share, **written}


def dense_layers() -> Row:
    """Layers of a Qwen 3 mixture that are dense: those named, and all but every n-th."""

    def read(config: Config) -> Knobs:
        depth, step, dense = config["num_hidden_layers"], config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        experts = config.get("num_experts", config.get("num_local_experts"))
        mixed = [layer not in dense and (layer + 1) % step == 0 for layer in range(depth)]
        return {LAYERS: [{"moe.experts": experts if there else None} for there in mixed]}

    def write(model: Model) -> Config:
        dense = [index for index, layer in enumerate(model.layers) if layer.moe.experts is None]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense,
                "num_experts": max((layer.moe.experts or 0 for layer in model.layers), default=0)}

    return Row(("decoder_sparse_step", "mlp_only_layers", "num_experts", "num_local_experts"), read, write)


def one_of(keys: tuple[str, ...], knob: str) -> Row:
    """Two spellings of one key; the first is written."""

    def read(config: Config) -> Knobs:
        key = next((key for key in keys if key in config), None)
        if key is None:
            raise UserError(f"config.json: has no {keys[0]!r}, which sets {knob}")
        return {knob: config[key]}

    def write(model: Model) -> Mapping[str, Any]:
        section, name = knob.rsplit(".", 1)
        return {keys[0]: getattr(getattr(model, section), name)}

    return Row(keys, read, write)
