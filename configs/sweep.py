"""Sweeps as data: axes of named overrides, and the members they span."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Literal

from configs.knobs import describe_type, file_name, fits, replace, require, spelling
from configs.schema import Experiment


@dataclass(frozen=True)
class Axis:
    """A name, and points: each a label and the overrides it stands for."""

    name: str
    points: tuple[tuple[str, tuple[tuple[str, object], ...]], ...]

    @property
    def knobs(self) -> set[str]:
        """The knobs that some point of the axis sets."""
        return {knob for _, overrides in self.points for knob, _ in overrides}


def values(knob: str, *points) -> Axis:
    """One knob over several values."""
    return Axis(knob, tuple((f"{point:g}" if isinstance(point, float) else str(point), ((knob, point),)) for point in points))


def variants(name: str, **points: dict[str, object]) -> Axis:
    """Named sets of overrides: variants("placement", pre={}, post={"model.norm.placement": "post"})."""
    return Axis(name, tuple((label, tuple(overrides.items())) for label, overrides in points.items()))


def seeds(count: int) -> Axis:
    """Seeds 0, 1, …: of the initial values and of the order of the data, so that members are paired by seed."""
    return values("train.seed", *range(count))


def check_disjoint(axes: tuple[Axis, ...]) -> None:
    """Raises ValueError where two axes set the same knob."""
    for first, second in itertools.combinations(axes, 2):
        shared = sorted(first.knobs & second.knobs)
        require(not shared, f"axes {first.name!r} and {second.name!r} both set {', '.join(shared)}")


def zipped(*axes: Axis) -> Axis:
    """Axes that move together, point by point. Raises ValueError where they differ in length."""
    require(len({len(axis.points) for axis in axes}) == 1, f"zipped axes {[axis.name for axis in axes]}: must have equally many points")
    check_disjoint(axes)
    return Axis("+".join(axis.name for axis in axes), tuple(
        ("+".join(label for label, _ in points), tuple(itertools.chain.from_iterable(overrides for _, overrides in points)))
        for points in zip(*(axis.points for axis in axes), strict=True)))


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its label on each axis, and its config."""

    labels: tuple[tuple[str, str], ...]
    config: Experiment

    @property
    def name(self) -> str:
        return file_name(",".join(f"{axis.rsplit('.', 1)[-1]}={label}" for axis, label in self.labels))


@dataclass(frozen=True)
class Curve:
    """One more figure of a sweep's report: a statistic of metrics.jsonl over the layers, the steps, or the points of an axis."""

    key: str
    """As in metrics.jsonl: "eval/loss", "probe.grad_norm.mlp"."""
    over: str
    """"layer", "step", or the name of an axis, whose labels are numbers or stand in their order."""
    layer: Literal["first", "last", "mean", "max"] = "mean"
    """Of a statistic per layer, unless over the layers: one of them, their mean or their largest."""
    step: Literal["first", "last"] = "last"
    """Unless over the steps: at init, or at the end."""

    def __post_init__(self):
        for knob in dataclasses.fields(self):
            value = getattr(self, knob.name)
            rule = f"must be {describe_type(knob.type)}{spelling(value, knob.type)}"
            require(fits(value, knob.type), f"curve {knob.name} = {value!r}: {rule}")


@dataclass(frozen=True)
class Sweep:
    """A question, a base, axes around it, and curves to draw: what a file of configs/ablations holds."""

    name: str
    question: str
    base: Experiment
    axes: tuple[Axis, ...]
    curves: tuple[Curve, ...] = ()

    @property
    def members(self) -> list[Member]:
        return members(self.base, self.axes)


def members(base: Experiment, axes: tuple[Axis, ...]) -> list[Member]:
    """The product of the axes, each member's overrides applied together.

    Raises ValueError for an axis that names an unknown knob, an impossible member, an empty sweep, an axis or label given twice, two axes
    that set the same knob, or two members with the same config.
    """
    require(bool(axes), "the sweep is empty: it has no axis")
    for axis in axes:
        labels = [label for label, _ in axis.points]
        require(bool(labels), f"axis {axis.name!r} is empty: it needs at least one point")
        require(len(set(labels)) == len(labels), f"axis {axis.name!r}: the labels {labels} are not all different")
    names = [axis.name for axis in axes]
    require(len(set(names)) == len(names), f"the axes {names} are not all different")
    check_disjoint(axes)
    found: dict[Experiment, Member] = {}
    for points in itertools.product(*(axis.points for axis in axes)):
        labels = tuple(zip(names, (label for label, _ in points), strict=True))
        overrides = dict(itertools.chain.from_iterable(overrides for _, overrides in points))
        try:
            member = Member(labels, replace(base, overrides))
        except ValueError as error:
            raise ValueError(f"member {labels}: {error}") from error
        twin = found.setdefault(member.config, member)
        require(twin is member, f"members {twin.name!r} and {member.name!r} have the same config")
    return list(found.values())
