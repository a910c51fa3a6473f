"""From words on the command line to an experiment, and from mistakes to one clear line and exit status 2."""

import dataclasses
import itertools
import sys
from collections.abc import Callable

import tyro

from configs.knobs import knob_types, replace
from configs.load import UserError, fingerprint, load, names, path_of, run_name
from configs.schema import Experiment


def parse_experiment(module: str, description: str, words: list[str] | None = None) -> tuple[Experiment, Experiment]:
    """The experiment that `NAME_OR_PATH [--section.knob value …]` means, and the one it started from.

    All overrides apply before validation. An unknown knob, a bad value or an impossible combination ends the program with exit status 2
    and a message that names the knob, the value, the rule and the nearest valid spelling.
    """
    words = list(itertools.chain.from_iterable(map(spelled, sys.argv[1:] if words is None else words)))
    name, overrides = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    if name is None and not {"-h", "--help"} & set(overrides):
        raise UserError(f"usage: python -m {module} NAME_OR_PATH [--section.knob value …]; NAME is one of {', '.join(names())}")
    base = with_source(load(name or "base"), overrides)
    usage = f"{module} {name or 'NAME_OR_PATH'}"
    text = f"{description}\n\nNAME_OR_PATH: one of {', '.join(names())}, or the path of a .py file with a function config() -> Experiment."
    unnamed = replace(base, {"run.name": None})
    config = tyro.cli(Experiment, default=unnamed, args=with_values(overrides), prog=f"python -m {usage}", description=text,
                      config=(tyro.conf.FlagConversionOff,))
    if config.run.name is None:
        name = base.run.name if fingerprint(config) == fingerprint(base) else run_name(config, base)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
    return config, base


def spelled(word: str) -> list[str]:
    """A word as tyro takes it: the knob "from", a word of Python's, as its field is called."""
    knob, equals, value = word.partition("=")
    return [word] if knob != "--init.from" else ["--init.from_", *([value] if equals else [])]


def with_source(base: Experiment, words: list[str]) -> Experiment:
    """The base with the model of the directory that --init.from names, if it does."""
    given = [value for word, value in itertools.pairwise(words) if word == "--init.from_" and value != "None"]
    if not given:
        return base
    from train.source import model_in

    directory = path_of(given[-1])
    try:
        return dataclasses.replace(base, model=model_in(directory))
    except ValueError as error:
        raise UserError(f"--init.from {directory}: {error}") from error


def with_values(words: list[str]) -> list[str]:
    """The words, with True after each yes-or-no knob that stands alone: --run.resume means --run.resume True."""
    switches = {f"--{knob}" for knob, kind in knob_types(Experiment).items() if kind is bool}

    def alone(i: int) -> bool:
        last = i + 1 == len(words) or words[i + 1].startswith("--")
        return last and words[i].startswith("--") and "--" + words[i][2:].replace("-", "_") in switches

    return [part for i, word in enumerate(words) for part in ((word, "True") if alone(i) else (word,))]


def exit_with(program: Callable[[], int]) -> None:
    """Ends the process with what `program` returns, or with 2 and one line where the user erred."""
    try:
        status = program()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"error: {error.filename or 'a file'} cannot be written or read: {error.strerror or error}", file=sys.stderr)
        status = 2
    sys.exit(status)
