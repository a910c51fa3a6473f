"""Programs are compiled when they are needed, and no step after the first waits for one."""

import jax

from tests.train.small import small, text_of
from tests.train.test_step import plan_of
from train import loop
from train.log import METRICS
from train.programs import make_programs, programs_of


def test_a_program_is_compiled_once():
    """Compiling ahead compiles what the config calls; once more compiles nothing."""
    programs_of.cache_clear()
    programs = make_programs(plan_of(small({"instruments.every": None, "instruments.probe_every": None})))
    assert programs.quiet.seconds == programs.evaluation.seconds == 0
    seconds, compiled = programs.compile(), programs.quiet.compiled
    assert seconds.keys() == {"evaluate", "quiet"} and all(took > 0 for took in seconds.values())
    assert programs.compile() == seconds and programs.quiet.compiled is compiled


def test_the_first_line_is_there_before_later_steps_are_compiled(tmp_path):
    """The quiet step, the only program that step 0 does not need, is compiled when line 0 is on the disk; later steps compile nothing."""
    (tmp_path / "text").write_text(text_of(4000))
    knobs = {"data.source": str(tmp_path / "text"), "train.steps": 6, "instruments.every": 3, "instruments.probe_every": 5, "eval.every": 4,
             "run.root": str(tmp_path), "run.name": "run", "run.progress": False, "run.compilation_cache": None}
    found: list[tuple[str, int]] = []
    path = tmp_path / "run" / METRICS

    def listen(event: str, _, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append((str(about["fun_name"]), len(path.read_text().splitlines()) if path.exists() else 0))

    programs_of.cache_clear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert loop.run(small(knobs)) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    of_run = [(name, lines) for name, lines in found if name in ("jit(evaluate)", "jit(probe)", "jit(step)")]
    assert of_run == [("jit(evaluate)", 0), ("jit(probe)", 0), ("jit(step)", 0), ("jit(step)", 1)]
