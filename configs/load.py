"""Experiments by name or path, their fingerprint, the name of a run, JSON and back."""

import dataclasses
import hashlib
import importlib.util
import json
import re
from pathlib import Path

from configs.knobs import diff, file_name, fits, flatten, knob_types, nearest, replace, spoken
from configs.schema import Experiment
from configs.sweep import Axis, Curve, Sweep

FOLDER = Path(__file__).parent
ABLATIONS = FOLDER / "ablations"


class UserError(Exception):
    """A mistake in what the user gave, told in one or two lines; the command ends with exit status 2."""


def names(folder: Path = FOLDER, function: str = "config") -> list[str]:
    """The files of a folder that define the function: experiments, or with `base` the sweeps of configs/ablations."""
    return sorted(path.stem for path in folder.glob("*.py") if re.search(rf"^def {function}\(", path.read_text(), re.M))


def load(name_or_path: str) -> Experiment:
    """The experiment of that name in configs/, of that .py file (what its `config()` returns), or of that config.json, with `run.name`
    filled in.

    Raises UserError where there is no such experiment, or where its file does not import.
    """
    path = find(name_or_path, FOLDER, "config")
    if path.suffix == ".json":
        return read_config(path)
    config = call(path, lambda module: module.config())
    if not isinstance(config, Experiment):
        raise UserError(f"config file {path}: config() must return a configs.schema.Experiment, not {type(config).__name__}")
    return config if config.run.name else replace(config, {"run.name": path.stem})


def load_sweep(name_or_path: str) -> Sweep:
    """The sweep of that name in configs/ablations/, or of that .py file: its docstring, `base()`, AXES, and CURVES where it has them.

    Raises UserError where there is no such sweep, its file does not import, or its members cannot be made.
    """
    path = find(name_or_path, ABLATIONS, "base")
    sweep = call(path, lambda module: Sweep(path.stem, (module.__doc__ or "").strip(), module.base(), tuple(module.AXES),
                                            tuple(getattr(module, "CURVES", ()))))
    if not isinstance(sweep.base, Experiment):
        raise UserError(f"sweep {path}: base() must return a configs.schema.Experiment, not {type(sweep.base).__name__}")
    if not all(isinstance(axis, Axis) for axis in sweep.axes):
        raise UserError(f"sweep {path}: AXES must be a tuple of configs.sweep.Axis")
    if not all(isinstance(curve, Curve) for curve in sweep.curves):
        raise UserError(f"sweep {path}: CURVES must be a tuple of configs.sweep.Curve")
    over = ["layer", "step", *(axis.name for axis in sweep.axes)]
    for curve in sweep.curves:
        if curve.over not in over:
            raise UserError(f"sweep {path}: curve over {curve.over!r}; {nearest(curve.over, over)}")
    try:
        sweep.members  # noqa: B018 the axes are checked by making the members
    except ValueError as error:
        raise UserError(f"sweep {path}: {error}") from error
    return sweep


def find(name_or_path: str, folder: Path, function: str) -> Path:
    """The file that a name in the folder, or a path, stands for."""
    path = Path(name_or_path)
    if name_or_path.endswith((".py", ".json")):
        if not path.is_file():
            raise UserError(f"config file {name_or_path} does not exist")
        return path
    known = names(folder, function)
    if name_or_path not in known:
        what = "experiment" if function == "config" else "sweep"
        raise UserError(f"no {what} is named {name_or_path!r}; {nearest(name_or_path, known)}, or give the path of a .py file")
    return folder / f"{name_or_path}.py"


def call(path: Path, use):
    """What `use` makes of the module at a path. Raises UserError, with the line, for whatever goes wrong in the file."""
    try:
        spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return use(module)
    except (Exception, SystemExit) as error:
        line = getattr(error, "lineno", None) or innermost_line(error, path)
        where = f" (line {line})" if line else ""
        raise UserError(f"config file {path} does not import: {type(error).__name__}: {' '.join(str(error).split())}{where}") from error


def innermost_line(error: Exception, path: Path) -> int | None:
    """The last line of the file `path` that the error's traceback passes through."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def fingerprint(config: Experiment) -> str:
    """Twelve hexadecimal digits that depend on every knob but the run section's, through what differs from the defaults: a knob that is new
    in the code and left as it is changes no run's identity."""
    kinds, defaults = knob_types(type(config)), flatten(Experiment())
    same = lambda knob, value: float(value) if type(value) is int and fits(0.5, kinds[knob]) else value  # 1 and 1.0 are equal
    identity = {knob: same(knob, value) for knob, value in flatten(config).items()
                if not knob.startswith("run.") and value != defaults[knob]}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def run_name(config: Experiment, base: Experiment) -> str:
    """The name of a run: its experiment and what differs from it, such as `tiny,norm.placement=post`, at most 120 characters."""
    parts = [base.run.name or "run"] + [f"{knob.removeprefix('model.')}={value}" for knob, (_, value) in diff(config, base).items()]
    name = file_name(",".join(parts))
    return name if len(name) <= 120 else f"{name[:100].rstrip(',')},{fingerprint(config)}"


def to_json(config: Experiment) -> str:
    """The config as nested JSON, one knob a line."""
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def path_of(text: str) -> Path:
    """The path that a text stands for. Raises UserError where it begins with the home of a user who is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: {first_line(error)}") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises UserError where the file is missing or damaged, or holds something else."""
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(held, dict):
        raise UserError(f"{path} cannot be read: it holds no JSON object")
    return held


def read_config(path: Path) -> Experiment:
    """The config in a JSON file. Raises UserError, with the path, where it is missing, damaged or none."""
    try:
        return from_json(path.read_text())
    except (UserError, OSError, ValueError) as error:
        raise UserError(f"config file {path}: {first_line(error)}") from error


def from_json(text: str) -> Experiment:
    """The config that `to_json` wrote. Raises UserError where the text is not one."""
    try:
        nested = json.loads(text)
        flat = {knob: tupled(value) for knob, value in flatten_json(nested)}
        return replace(Experiment(), flat)
    except (ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"not a config: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an exception says, cut to one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def tupled(value):
    """JSON's lists, at any depth, as the tuples that they were."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def flatten_json(nested: dict, prefix: str = ""):
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from flatten_json(value, f"{prefix}{key}.")
        else:
            yield prefix + spoken(key), value
