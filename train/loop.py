"""A run, from config to summary, top to bottom."""

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from configs.load import path_of
from configs.schema import Experiment
from models.description import warnings
from train import directory as run_directory
from train.checkpoint import Checkpoints
from train.clock import Clock
from train.data.batches import contents, held_out_batch, training_batches
from train.data.corpus import Corpus, read
from train.guard import EXIT, Signals
from train.log import METRICS, Log, digest_before, read_lines, spelled
from train.mesh import make_mesh
from train.nonfinite import all_finite, origin
from train.optim import numbers
from train.processes import failing_alone, join_processes, one_record
from train.programs import due, make_programs
from train.recorder import Diverged, Recorder
from train.replay import Replay
from train.spikes import Spiked, Watch
from train.state import make_plan
from train.summary import summarise
from train.warm_start import start

console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def run(config: Experiment) -> int:
    """Trains as the config says; returns the exit status. Line s of metrics.jsonl tells of the parameters after s updates."""
    join_processes()
    keep_compiled(config.run.compilation_cache)
    plan = make_plan(config, make_mesh(config.mesh))
    corpus = read(config.data.source)
    batch = training_batches(corpus, config.data, config.train.seed, plan.mesh)
    parts = config.eval.batches
    held_out = [held_out_batch(corpus, config.data, plan.mesh, config.data.batch, part, parts) for part in range(parts)]
    probe_batch = held_out_batch(corpus, config.data, plan.mesh, config.instruments.probe_batch)
    claimed, continued = run_directory.claim(config)
    with Signals() as signals, failing_alone(), one_record(claimed) as directory:
        checkpoints = Checkpoints(claimed / "checkpoints", config)
        programs = make_programs(plan)
        fresh = lambda: start(plan, programs.fresh(config.train.seed, numbers(config.optim)), probe_batch, console.print)
        record = lambda step: digest_before(claimed / METRICS, step)
        tell_failure = console.print if config.train.on_save_error == "continue" else None
        done, state = checkpoints.restore(plan.shapes(), console.print, record) or (0, fresh())
        run_directory.describe(directory, conditions(config, corpus), done if continued else None)
        log, clock = Log(directory, config, done if continued else None), Clock(config.data.batch * config.data.sequence)
        of_batch = functools.partial(contents, corpus, config.data, config.train.seed)
        before = [line for line in read_lines(claimed / METRICS) if line["step"] < done] if config.spikes.action else []
        panels = checkpoints.panels(done) if done and config.spikes.ring else []
        watch = Watch(config, directory, checkpoints, of_batch, before, panels, console.print)
        step, steps, status, cause = done, config.train.steps, "failed", None
        try:
            with Recorder(log, clock, config, done, watch.judge) as recorder, jax.transfer_guard_device_to_host("disallow"):
                for step in itertools.count(done):
                    values: dict[str, Any] = {}
                    if step == steps or due(config.eval.every, step):
                        values["eval/loss"] = programs.evaluate(state.parameters, held_out)
                    if due(config.instruments.probe_every, step):
                        values |= programs.probe(state.parameters, probe_batch)
                    stopping = step == steps or signals.agree()
                    if step > done and config.checkpoint.every and (stopping or due(config.checkpoint.every, step)):
                        recorder.settle()
                        log.flush()  # what a run continued from here will not write again
                        if not all_finite(state.parameters):
                            raise Diverged(step, "a parameter is not finite, and no checkpoint holds it,")
                        checkpoints.save(step, state, values.get("eval/loss"), log.digest.hexdigest(), tell_failure,
                                         watch.panels(step - 1))
                        clock.restart()
                    if stopping:
                        break
                    state, panel = programs.training(step)(state, batch(step))
                    recorder.push(step, values | watch.written(step, panel), timed=not values)
                    if step == done:
                        recorder.settle()
                        programs.compile()  # so that no later step waits for the compiler
                        clock.restart()
                if step == steps:
                    recorder.push(step, values, timed=False)
                recorder.settle()
                checkpoints.finish(tell_failure)
                status = "completed" if step == steps else signals.agreed
        except Diverged as error:
            state, status, step = None, "diverged", error.step  # room for the state that is repeated
            console.print(f"diverged: {error}")
            if config.spikes.ring:
                watch.keep(step, {})
            cause = origin(Replay(plan, programs, batch, checkpoints, fresh, console.print), step, held_out)
            console.print(cause)
        except Spiked as error:
            status, step, cause = "diverged", error.step, str(error)
            console.print(f"stopped: {error}; the evidence is in {watch.folder}/{step}")
        finally:
            checkpoints.close(console.print)
            summary = summarise(directory, plan, status, step, clock, corpus) | {"cause": cause}
            run_directory.write(directory / run_directory.SUMMARY, json.dumps(spelled(summary), indent=1) + "\n")
        tell(directory, summary)
    return EXIT[status]


def conditions(config: Experiment, corpus: Corpus) -> dict[str, Any]:
    """The run's conditions, with the warnings about its config, which are told too."""
    warned = warnings(config.model)
    for line in warned:
        console.print(f"warning: {line}")
    return run_directory.conditions_here(config, corpus) | {"warnings": warned}


def keep_compiled(folder: str | None) -> None:
    """Keeps compiled programs in a folder, for the next process that needs the same."""
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(path_of(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def tell(directory: Path, summary: dict[str, Any]) -> None:
    """Prints how the run ended."""
    print(f"{summary['status']} at step {summary['step']}: {directory}")
    if summary["eval_loss"] is not None:
        print(f"held-out loss {summary['eval_loss']:.4f} nats per byte; of the same text the unigram entropy is "
              f"{summary['held_out_unigram_entropy']:.4f}, the bigram entropy {summary['held_out_bigram_entropy']:.4f}")
    here = Path(sys.executable)
    python = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    print(f"{python} -m tensorboard.main --logdir {directory.parent}")
