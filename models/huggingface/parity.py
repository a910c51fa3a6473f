"""Compares a model with recorded outputs of the reference library, site by site, in the order of the forward pass."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from configs.load import UserError
from models.huggingface.checkpoint import load_config, load_parameters
from models.parameters import bind, table
from models.taps import Taps
from models.transformer import Output, Transformer

TOLERANCE = {"float32": 5e-5, "float64": 1e-10}
"""Largest difference by the lower precision of the two sides: absolute, or relative to the reference's largest entry if above one."""

SITES = ("resid.pre", "attn.rows", "attn.lse", "attn.out", "router.logits", "router.weights", "mlp.out", "resid.post", "resid.final")


class Difference(NamedTuple):
    """The largest difference from the reference at one site of one layer (None: of the frame)."""

    case: str
    layer: int | None
    site: str
    largest: float
    holds: bool


def compare(directory: Path, dtype: str = "float32") -> list[Difference]:
    """Each array of reference.npz against the model of a directory. Raises UserError where there is no reference, or where it is that of
    another model."""
    try:
        reference = dict(np.load(directory / "reference.npz", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / 'reference.npz'} cannot be read: {error}") from error
    model, family = load_config(directory)
    parameters = load_parameters(directory, family, table(Transformer(model)), dtype)
    found = []
    for case in ("", "long_"):
        if f"{case}input_ids" not in reference:
            continue
        arrays = {key.removeprefix(case): value for key, value in reference.items() if key.startswith("long_") == bool(case)}
        output = outputs(Transformer(model, rows=arrays["input_ids"].shape[1]), parameters, jnp.asarray(arrays["input_ids"]))
        for layer, site, ours, theirs in pairs(arrays, output.records, output.logits, model.depth):
            if ours.shape != theirs.shape:
                raise UserError(f"{directory / 'reference.npz'}: {site} has shape {theirs.shape} there, {ours.shape} in this model")
            largest = float(np.abs(np.asarray(ours, np.float64) - theirs).max())
            lower = "float32" if theirs.dtype == np.float32 else dtype
            bound = TOLERANCE[lower] * max(1.0, float(np.abs(theirs).max()))
            found.append(Difference(case.rstrip("_") or "short", layer, site, largest, largest <= bound))
    if not found:
        raise UserError(f"{directory / 'reference.npz'} holds nothing to compare: input_ids and logits_f64 at the least")
    return found


def outputs(transformer: Transformer, parameters: dict[str, Array], tokens: Int[Array, "b t"]) -> Output:
    """The logits, and every site that may be compared, in one program: as it runs once, it is compiled in haste."""
    taps = Taps(record={site: lambda x: x for site in SITES})
    forward = lambda parameters, tokens: bind(transformer, parameters)(tokens, taps=taps)
    return jax.jit(forward, compiler_options={"xla_backend_optimization_level": 0})(parameters, tokens)


def pairs(reference: Mapping[str, np.ndarray], records: Mapping, logits: Array, depth: int) -> Iterator[tuple]:
    """(layer, site, ours, theirs) of what the reference has, in the order of the forward pass."""
    for layer in range(depth):
        of = lambda site, layer=layer: np.asarray(records[site][layer])
        has = lambda name, layer=layer: f"{name}_{layer}" in reference
        theirs = lambda name, layer=layer: reference[f"{name}_{layer}"]
        if "hidden_states" in reference:
            yield layer, "resid.pre", of("resid.pre"), reference["hidden_states"][layer]
        if has("attn_probs"):
            shown = np.exp(of("attn.rows") - np.swapaxes(of("attn.lse"), 1, 2)[..., None])
            rows = slice(None) if theirs("attn_probs").shape[2] == shown.shape[2] else [5, 40, 95]
            yield layer, "attention probabilities", shown[:, :, rows], theirs("attn_probs")
        if has("attn_out"):
            yield layer, "attn.out", of("attn.out")[:1], theirs("attn_out")
        if has("router_logits"):
            yield layer, "router.logits", of("router.logits"), theirs("router_logits").reshape(of("router.logits").shape)
        if has("router_weights"):
            dense = np.zeros((len(theirs("router_weights")), of("router.weights").shape[-1]), theirs("router_weights").dtype)
            np.put_along_axis(dense, theirs("router_indices"), theirs("router_weights"), axis=-1)
            yield layer, "router.weights", of("router.weights"), dense.reshape(of("router.weights").shape)
        if has("mlp_out"):
            yield layer, "mlp.out", of("mlp.out")[:1], theirs("mlp_out")
    if "hidden_states" in reference:
        yield depth - 1, "resid.post", np.asarray(records["resid.post"][depth - 1]), reference["hidden_states"][depth]
    if "final_hidden" in reference:
        yield None, "resid.final", records["resid.final"], reference["final_hidden"]
    if "logits_f64" in reference:
        yield None, "logits", logits, reference["logits_f64"]
    if "logits_f64_tail" in reference:
        tail = reference["logits_f64_tail"]
        yield None, "logits", logits[:, -tail.shape[1]:], tail
