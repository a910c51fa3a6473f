"""summary.json: a run in a few numbers, from its metrics.jsonl."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import fingerprint
from models.parameters import counts, flops_per_token
from train.clock import Clock
from train.data.corpus import Corpus, entropies
from train.guard import Status
from train.log import METRICS, read_lines
from train.metrics import spike_score, spike_score_of_steps
from train.state import Plan


def summarise(directory: Path, plan: Plan, status: Status, step: int, clock: Clock, corpus: Corpus) -> dict[str, Any]:
    """Losses are cross entropies in nats per token; the training loss is that of the last step, spike_score that of the gradient norm
    (`train.metrics.spike_score`, by OLMo 2), spike_score_of_steps that of loss and gradient norm (by OLMo-core), largest_attention_logit
    over all panels; step_seconds leave out compilation and evaluations."""
    lines = read_lines(directory / METRICS)
    unigram, bigram = entropies(corpus.held_out)
    series = lambda key: [float(line[key]) for line in lines if key in line]
    train, held_out = series("train/loss"), series("eval/loss")
    logits = [x for line in lines for key in ("attention_logit_max", "probe.attention_logit_max") for x in numbers(line.get(key, ()))]
    return {
        "status": status,
        "step": step,
        "train_loss": train[-1] if train else None,
        "eval_loss": held_out[-1] if held_out else None,
        "best_eval_loss": float(np.nanmin(held_out)) if np.isfinite(held_out).any() else None,
        "initial_eval_loss": held_out[0] if held_out and lines[0]["step"] == 0 and "eval/loss" in lines[0] else None,
        "tokens_per_second": clock.tokens_per_second(),
        "step_seconds": clock.percentiles(),
        "largest_attention_logit": max(logits) if logits else None,
        "spike_score": spike_score(np.asarray(series("train/grad_norm"))),
        "spike_score_of_steps": spike_score_of_steps(np.asarray(train), np.asarray(series("train/grad_norm"))),
        "skipped_steps": int(series("train/skipped")[-1]) if train else 0,
        "parameters": counts(plan.rows),
        "flops_per_token": flops_per_token(plan.config.model, plan.rows, plan.config.data.sequence),
        "held_out_unigram_entropy": unigram,
        "held_out_bigram_entropy": bigram,
        "fingerprint": fingerprint(plan.config),
    }


def numbers(values: Iterable) -> list[float]:
    return [float(x) for x in values if x is not None]
