"""Dotted knobs: read, write and compare frozen dataclasses as {"model.norm.kind": "rms", …}, with errors that name the nearest knob."""

import ast
import dataclasses
import difflib
import re
import types
import typing

LARGEST = 2.0**128 - 2.0**104
"""The largest float32."""


def require(holds: bool, message: str) -> None:
    """Raises ValueError(message) unless `holds`: one line that names the knob, the value and the rule."""
    if not holds:
        raise ValueError(message)


def check_values(flat: dict[str, object], where: str = "") -> None:
    """Raises ValueError for a knob with a number that is not finite, a whole number beyond 32 bits, or a text that no file can hold."""
    for knob, value in flat.items():
        for part in value if isinstance(value, tuple) else (value,):
            require(not isinstance(part, float) or abs(part) <= LARGEST, f"{where}{knob} = {value}: must be finite, in float32")
            require(not isinstance(part, int) or abs(part) < 2**31, f"{where}{knob} = {value}: must lie between -2^31 and 2^31")
            require(not isinstance(part, str) or ("\0" not in part and part == part.encode(errors="ignore").decode()),
                    f"{where}{knob} = {value!r}: must be text, without zero bytes")


def nearest(word: str, choices) -> str:
    """A hint: the closest of the choices, or all of them."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"perhaps you meant {close[0]!r}" if close else f"choose from {', '.join(sorted(choices))}"


def spoken(name: str) -> str:
    """A field's name as a knob: an underscore that keeps it off a word of Python's is left out (`from_` is the knob "from")."""
    return name.rstrip("_")


def flatten(config, prefix: str = "") -> dict[str, object]:
    """A dataclass as dotted knobs and values: {"model.norm.kind": "rms", …}."""
    flat = {}
    for knob in dataclasses.fields(config):
        value = getattr(config, knob.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{knob.name}.")
        else:
            flat[prefix + spoken(knob.name)] = value
    return flat


def build(kind: type, flat: dict[str, object], prefix: str = ""):
    """The dataclass `kind` from dotted knobs: the inverse of `flatten`. Absent knobs keep their defaults."""
    values = {}
    for knob in dataclasses.fields(kind):
        if dataclasses.is_dataclass(knob.type):
            values[knob.name] = build(knob.type, flat, f"{prefix}{knob.name}.")
        elif prefix + spoken(knob.name) in flat:
            values[knob.name] = flat[prefix + spoken(knob.name)]
    return kind(**values)


def replace(config, changes: dict[str, object]):
    """The config with some dotted knobs changed, all at once, then checked. Raises ValueError for an unknown knob or a wrong value."""
    flat, kinds = flatten(config), knob_types(type(config))
    for knob, value in changes.items():
        if knob not in kinds:
            raise ValueError(f"unknown knob {knob!r}; {nearest(knob, kinds)}")
        if not fits(value, kinds[knob]):
            raise ValueError(f"{knob} = {value!r}: must be {describe_type(kinds[knob])}{spelling(value, kinds[knob])}")
        flat[knob] = value
    return build(type(config), flat)


def knob_types(kind: type, prefix: str = "") -> dict[str, object]:
    """The type of each dotted knob of a dataclass."""
    found = {}
    for knob in dataclasses.fields(kind):
        found |= knob_types(knob.type, f"{prefix}{knob.name}.") if dataclasses.is_dataclass(knob.type) else {
            prefix + spoken(knob.name): knob.type}
    return found


def fits(value, kind) -> bool:
    """Whether the value is of the annotated type (int passes for float, bool for nothing else)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        inner = arguments[:1] * len(value) if isinstance(value, tuple) and arguments[-1] is ... else arguments
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if kind is type(None) else isinstance(value, kind)


def describe_type(kind) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(option) for option in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return "a tuple of " + describe_type(arguments[0])
    return "None" if kind is type(None) else kind.__name__


def spelling(value, kind) -> str:
    """The nearest of a Literal's choices, where the value is a text."""
    literals = [option for option in (kind, *typing.get_args(kind)) if typing.get_origin(option) is typing.Literal]
    choices = [choice for literal in literals for choice in typing.get_args(literal)]
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"; perhaps you meant {close[0]!r}" if close else ""


def parse_changes(text: str) -> dict[str, object]:
    """'attention.window=512 norm.kind=rms' as {knob: value}. Values are Python literals; a bare word is a text."""
    changes = {}
    for part in text.split():
        knob, equals, value = part.partition("=")
        require(bool(knob and equals and value), f"layer change {part!r}: must read knob=value, with no spaces inside")
        try:
            changes[knob] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # of deep nesting the last two
            changes[knob] = value
    return changes


def tell(changes: dict[str, tuple[object, object]], here: str = "here") -> str:
    """What `diff` found, in words; the base is what is "there"."""
    return "; ".join(f"{knob} = {there!r} there, {ours!r} {here}" for knob, (there, ours) in changes.items())


def file_name(text: str) -> str:
    """The text with whatever a file name should not hold as underscores."""
    return re.sub(r"[^\w.,=+-]+", "_", text, flags=re.ASCII)


def diff(config, base) -> dict[str, tuple[object, object]]:
    """Knobs that differ: {knob: (value in base, value in config)}. The run section is left out."""
    ours, theirs = flatten(config), flatten(base)
    return {k: (theirs.get(k), ours.get(k)) for k in sorted(ours | theirs) if ours.get(k) != theirs.get(k) and not k.startswith("run.")}
