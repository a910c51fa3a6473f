"""The benchmark prints what it says it measures."""

import json
import sys

import pytest

import train.bench
from scripts import bench as script
from tests.train.processes import strict_json, write_config
from tests.train.small import text_of

KEYS = {"conditions", "pairs", "step_seconds", "tokens_per_second", "compile_seconds", "peak_resident_bytes", "model_flops_per_token",
        "matmul_gflops", "fraction_of_matmul", "telemetry_percent"}


@pytest.mark.parametrize("every", ["4", "None"])
def test_one_json_object_with_every_measurement(every, tmp_path, monkeypatch, capsys):
    """scripts.bench prints one JSON object: conditions, quiet and loud step times, tokens/s, compile seconds, memory, FLOPs per token,
    the rate of a matrix product and the share of it that training reaches, and the cost of telemetry at its interval."""
    (tmp_path / "text.txt").write_text(text_of(5000))
    monkeypatch.setattr(train.bench, "PAIRS", 2)
    monkeypatch.setattr(train.bench, "PRODUCTS", ((64, 64, 64),))
    words = ["scripts.bench", str(write_config(tmp_path, tmp_path / "text.txt")), "--instruments.every", every]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0
    found = strict_json(capsys.readouterr().out)
    assert found.keys() >= KEYS and found["pairs"] == 2
    for name in ("quiet", "loud"):
        times = found["step_seconds"][name]
        assert 0 < times["p50"] <= times["p95"] <= times["p99"] and found["compile_seconds"][name] > 0
    tokens = 4 * 16
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"]["quiet"]["p50"], rel=1e-3)
    rate = found["model_flops_per_token"] * found["tokens_per_second"] / (1e9 * found["matmul_gflops"])
    assert found["fraction_of_matmul"] == pytest.approx(rate, rel=1e-3)
    assert found["peak_resident_bytes"] > 10**8  # JAX alone is more
    if every == "None":
        assert found["telemetry_percent"] is None
    else:
        assert found["telemetry_percent"] == pytest.approx(100 * (found["loud_over_quiet"]["median"] - 1) / 4, abs=0.01)
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 256  # attention and MLP of two layers, and the tied head
    attention = 2 * 4 * 16 * (16 + 1) / 2  # scores and values over the keys that are seen, 8.5 on average
    assert found["model_flops_per_token"] == 3 * (2 * weights + attention)
    assert json.dumps(found["conditions"])
