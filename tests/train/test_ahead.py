"""What a step takes on a mesh, read off the compiled program: bytes on each device, and what crosses between devices."""

import pytest

from configs.knobs import replace
from configs.load import load
from models.parameters import counts, table
from models.transformer import Transformer
from train.ahead import Ahead, ahead, bytes_of, collectives_of, on_device, step
from train.mesh import make_mesh
from train.state import make_plan

TOKENS = 2 * 8
SMALL = {"model.width": 16, "model.depth": 1, "model.attention.heads": 2, "model.mlp.width": 32, "model.attention.kernel": "dense",
         "data.batch": 2, "data.sequence": 8, "instruments.probe_every": None, "optim.clip": None}

PROGRAM = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %whole = f32[8,8]{1,0} all-gather(%part), dimensions={0}
  %pair = (f32[2]{0}, /*index=1*/bf16[3]{0}) all-reduce(%x, %y), to_apply=%add
}

%condition (state: (s32[], f32[4,8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %total = f32[]{} all-reduce(%z), to_apply=%add
}
"""


def config(**changes):
    return replace(load("base"), SMALL | {knob.replace("__", "."): value for knob, value in changes.items()})


def test_collectives_in_a_loop_count_as_often_as_it_turns():
    """Of a loop of three turns with a gather of 8 x 8 and a reduction of 2 floats and 3 half floats, and one scalar after it."""
    assert collectives_of(PROGRAM) == {"all-gather": (3, 3 * 256), "all-reduce": (4, 3 * (8 + 6) + 4)}


@pytest.mark.parametrize(("shape", "size"), (("f32[8,16]{1,0}", 512), ("(f32[2]{0}, bf16[3]{0})", 14), ("f32[]", 4), ("token[]", 0)))
def test_bytes_of_a_shape(shape, size):
    assert bytes_of(shape) == size


def test_parameters_are_divided_over_fsdp():
    """Each of two devices holds half of every weight; the moments twice that, beside counters."""
    of = config(mesh__fsdp=2)
    total = 4 * counts(table(Transformer(of.model)))["total"]
    shapes = make_plan(of, make_mesh(of.mesh)).shapes()
    assert on_device(shapes.parameters) == total // 2
    assert total <= on_device(shapes.optimizer) <= total + 64


def test_qk_norm_over_heads_stays_on_its_device_and_over_all_sends_scalars():
    """Under tensor parallelism a per-head QK-norm adds no collective; one over the whole projection adds, for q and for k, a scalar per
    token forward and one backward, and nothing else but the square sums of its divided gains."""
    found = {}
    for kind in ("none", "head", "whole"):
        of = config(mesh__tensor=2, model__attention__qk_norm__kind=kind)
        found[kind] = collectives_of(step(of, make_mesh(of.mesh)).as_text())
    count, size = ({kind: sum(of[i] for of in found[kind].values()) for kind in found} for i in (0, 1))
    gains = 2 * 8 * 4  # one [k] gain for queries and one for keys: their gradients join a reduction that is there
    assert count["head"] == count["none"] and size["head"] <= size["none"] + gains
    assert size["none"] + 4 * TOKENS * 4 <= size["whole"] <= size["none"] + 4 * TOKENS * 4 + gains


def test_fsdp_gathers_the_weights_of_a_layer_at_most_twice():
    """What is gathered in a step is at most each parameter once forward and once backward."""
    of = config(mesh__fsdp=2, model__depth=2)
    gathered = collectives_of(step(of, make_mesh(of.mesh)).as_text())["all-gather"][1]
    weights = 4 * counts(table(Transformer(of.model)))["total"]
    assert weights <= gathered <= 2 * weights


def test_each_remat_policy_is_told():
    """The table has temporaries for each policy and the collectives of the config's own."""
    found = ahead(config(mesh__data=2))
    assert isinstance(found, Ahead) and set(found.activations) == {"none", "dots", "full"} and min(found.activations.values()) > 0
    assert found.collectives["all-reduce"][1] >= 4 * counts(table(Transformer(config().model)))["total"]
    title, columns, rows = found.sheet
    assert len(rows) == 2 + 3 + len(found.collectives) and all(len(row) == len(columns) for row in rows) and title
