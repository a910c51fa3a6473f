"""Which layers see every key and which a window of them: the ways in which families say so."""

from collections.abc import Callable
from dataclasses import dataclass

from configs.load import UserError
from models.huggingface.keys import Config

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """A row of WINDOWS: the keys it understands, the type of each layer by them, and the keys that say the types; `width` is the window of
    the sliding layers (None: there are none), `longest` what a key that must hold a number says then."""

    keys: tuple[str, ...]
    read: Callable[[Config], list[str]]
    write: Callable[[list[str], int | None, int], Config]


def every_layer(config: Config) -> list[str]:
    return [FULL if config.get("sliding_window") is None else SLIDING] * config["num_hidden_layers"]


def switched(config: Config) -> list[str]:
    return [SLIDING if config.get("use_sliding_window") else FULL] * config["num_hidden_layers"]


def above(config: Config) -> list[str]:
    """The layers from max_window_layers on, where windows are switched on."""
    on = config.get("use_sliding_window")
    return [SLIDING if on and layer >= config["max_window_layers"] else FULL for layer in range(config["num_hidden_layers"])]


def all_but_every(period: int, key: str | None = None) -> Callable[[Config], list[str]]:
    """All layers but each n-th."""
    step = lambda config: config.get(key, period)
    return lambda config: [SLIDING if (layer + 1) % step(config) else FULL for layer in range(config["num_hidden_layers"])]


def listed(default: Callable[[Config], list[str]]) -> Callable[[Config], list[str]]:
    """The types as layer_types lists them, else by a rule."""

    def read(config: Config) -> list[str]:
        types, depth = config.get("layer_types"), config["num_hidden_layers"]
        if types is None:
            return default(config)
        if len(types) != depth or set(types) - {FULL, SLIDING}:
            raise UserError(f"config.json: layer_types = {types} is not supported: {depth} of {FULL!r} and {SLIDING!r} are known")
        return list(types)

    return read


def with_types(types: list[str], width: int | None, longest: int) -> Config:
    """The list, and a window even where no layer has one: the reference library wants a number."""
    return {"layer_types": types, "sliding_window": width or longest}


def with_switch(types: list[str], width: int | None, longest: int) -> Config:
    return {"sliding_window": width, "use_sliding_window": width is not None}


WINDOWS: dict[str | None, Windows] = {
    None: Windows((), lambda config: [FULL] * config["num_hidden_layers"], lambda types, width, longest: {}),
    "every layer": Windows(("sliding_window",), every_layer, lambda types, width, longest: {"sliding_window": width}),
    "switched": Windows(("sliding_window", "use_sliding_window"), switched, with_switch),
    "above": Windows(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), listed(above),
                     lambda types, width, longest: {"layer_types": types, **with_switch(types, width, longest)}),
    "alternating": Windows(("sliding_window", "layer_types"), listed(all_but_every(2)), with_types),
    "five in six": Windows(("sliding_window", "layer_types", "sliding_window_pattern"),
                           listed(all_but_every(6, "sliding_window_pattern")), with_types),
}


def windows(of: Windows, config: Config) -> tuple[list[str], int | None]:
    """The type of each layer, and the window of the sliding ones. Raises UserError where layers slide and no window is given."""
    types = of.read(config)
    if SLIDING not in types:
        return types, None
    off = "use_sliding_window" in of.keys and not config.get("use_sliding_window")
    if off or config.get("sliding_window") is None:
        why = "use_sliding_window is off" if off else "there is no sliding_window"
        raise UserError(f"config.json: layer {types.index(SLIDING)} is of type {SLIDING!r}, but {why}")
    return types, config["sliding_window"]
