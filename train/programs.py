"""The compiled programs of a run: compiled once for all runs of one structure, each when it is first needed."""

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from configs.knobs import flatten, replace
from configs.schema import Experiment
from train.mesh import make_mesh
from train.optim import NUMBERS
from train.state import Plan, State, make_plan
from train.step import make_evaluation, make_probe, make_step


class Program:
    """A program for arguments of known shapes, compiled when it is first called or asked for; `seconds`: what that took, 0 before."""

    def __init__(self, name: str, program, *shapes):
        self.name, self.program, self.shapes, self.seconds = name, program, shapes, 0.0

    def __call__(self, *arguments):
        return self.compiled(*arguments)

    @functools.cached_property
    def compiled(self):
        start = time.perf_counter()
        compiled = self.program.lower(*self.shapes).compile()
        give_back_memory()
        self.seconds = time.perf_counter() - start
        return compiled


def give_back_memory() -> None:
    """Gives what the compiler has freed back to the system, where the C library would keep it (glibc)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Programs:
    """The programs of a run; what its config never calls is None. `fresh` makes the state before the first step, from a seed and the
    optimiser's numbers; `evaluation` takes one batch; `every`: steps between two loud ones."""

    fresh: Callable[..., State]
    evaluation: Program
    probe: Program | None
    loud: Program | None
    quiet: Program | None
    every: int | None

    def training(self, step: int) -> Program:
        """The program that trains at a step."""
        return self.loud if due(self.every, step) else self.quiet

    def evaluate(self, parameters, batches: list[Array]) -> Array:
        """Mean loss of equal batches at the present parameters, nats per token."""
        return mean([self.evaluation(parameters, batch) for batch in batches])

    def compile(self) -> dict[str, float]:
        """Compiles what is not yet compiled; the seconds that each took, by name."""
        programs = [program for program in (self.evaluation, self.probe, self.loud, self.quiet) if program is not None]
        for program in programs:
            _ = program.compiled
        return {program.name: program.seconds for program in programs}


@jax.jit
def mean(losses: list[Array]) -> Array:
    return jnp.mean(jnp.stack(losses))


def due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps, from step 0 on, happens at this one."""
    return every is not None and step % every == 0


def make_programs(plan: Plan) -> Programs:
    """The programs of a plan; plans of one structure share them."""
    return programs_of(structure(plan.config))


def structure(config: Experiment) -> Experiment:
    """The config without what the programs do not depend on: the optimiser's numbers, the seed, the run's name and intervals."""
    default = Experiment()
    knobs = [f"optim.{knob}" for knob in NUMBERS if getattr(config.optim, knob) is not None]
    knobs += ["train.seed", "train.on_save_error", "init.from", "data.skip"]
    knobs += [f"spikes.{knob}" for knob in ("action", "deviations", "window") if config.spikes.action != "skip"]
    knobs += [knob for knob in flatten(config) if knob.startswith(("run.", "checkpoint.", "eval."))]
    return replace(config, {knob: flatten(default)[knob] for knob in knobs if knob != "optim.warmup"} | {"optim.warmup": 0})


@functools.lru_cache(maxsize=2)
def programs_of(config: Experiment) -> Programs:
    """The programs of a structure."""
    plan, instruments = make_plan(config, make_mesh(config.mesh)), config.instruments
    state, batch, probe_batch = plan.shapes(), plan.tokens(config.data.batch), plan.tokens(instruments.probe_batch)
    trains, every = config.train.steps > 0, instruments.every if config.spikes.ring is None else 1
    return Programs(
        plan.maker,
        Program("evaluate", make_evaluation(plan), state.parameters, batch),
        None if instruments.probe_every is None else Program("probe", make_probe(plan), state.parameters, probe_batch),
        None if every is None or not trains else Program("loud", make_step(plan, loud=True), state, batch),
        None if every == 1 or not trains else Program("quiet", make_step(plan, loud=False), state, batch),
        every,
    )
