"""What a sweep spends on compiling, against what one of its members does."""

from collections import Counter

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from configs.load import load_sweep
from tests.train.ablation.sweeps import write_sweep, write_text
from train.ablation.run import run_members, write_configs
from train.ablation.sweep import placed
from train.programs import programs_of

TWELVE = 'seeds(3), values("optim.learning_rate", 0.01, 0.1), values("optim.weight_decay", 0.0, 0.1)'
SHORT = {
    "train.steps": 1, "optim.warmup": 0, "model.depth": 1, "instruments.every": None, "instruments.probe_every": None, "eval.batches": 1,
}


@pytest.fixture
def empty_cache(tmp_path):
    """A folder for compiled programs that is empty, as on a new machine; afterwards this process's own is in use again."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    programs_of.cache_clear()
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def compilations():
    """(program, seconds) of what JAX compiles, or takes from the folder of compiled programs, while the test runs."""
    found: list[tuple[str, float]] = []

    def listen(event: str, seconds: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append((str(about["fun_name"]), seconds))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_twelve_members_compile_as_one(empty_cache, compilations, tmp_path):
    """Three seeds x two learning rates x two decays compile one step and one evaluation, and spend on all that JAX compiles at most 1.3
    times what the first of them spends."""
    file = write_sweep(tmp_path, write_text(tmp_path), TWELVE, SHORT, cache=empty_cache)
    spent = []
    for path in write_configs(placed(load_sweep(str(file)), str(tmp_path / "runs"))):
        before = len(compilations)
        assert run_members([path]) == 0
        spent.append(sum(seconds for _, seconds in compilations[before:]))
    assert len(spent) == 12 and spent[0] > 0
    programs = Counter(program for program, _ in compilations)
    assert programs["jit(step)"] == programs["jit(evaluate)"] == 1
    assert sum(spent) <= 1.3 * spent[0], [f"{of:.2f}" for of in spent]
