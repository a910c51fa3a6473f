"""Causal self-attention: projections, QK-norm, RoPE, `attend`, output."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.model import Layer
from configs.norm import NormContract
from models.kernels import attend
from models.kernels.scores import logit_rows, mean_cosine
from models.norms import Norm, normalise
from models.parameters import parameter
from models.precision import Operands
from models.projection import Projection
from models.rope import rotate
from models.taps import Tap

QK_NORMS: dict[str, dict] = {
    "head": {"each": False, "over": 1},  # Henry et al. 2020, arXiv 2010.04245; Qwen 3, Gemma 3
    "head_each": {"each": True, "over": 1},
    "whole": {"each": True, "over": 2},  # OLMo 2, MiniMax-M2
}
"""`each`: a gain of its own for each head; `over`: trailing axes of [heads, k] that share one statistic."""


class Attention(nnx.Module):
    """out(sum_s p[t, s] v[s]) with p = softmax(scale norm(q) . norm(k)); grouped queries, Ainslie et al. 2023, arXiv 2305.13245."""

    def __init__(self, layer: Layer, width: int, rows: int, operands: Operands):
        config = layer.attention
        self.config, self.rope, self.rows, self.operands = config, layer.rope, rows, operands
        h, g, k = config.heads, config.kv_heads or config.heads, config.width_of_head(width)

        def inward(role, heads, axis):
            return Projection("btd,dhk->bthk", (width, heads, k), f"attention.{role}", ("embed", axis, None),
                              bias=role in config.bias, operands=operands)

        self.q, self.k, self.v = inward("q", h, "heads"), inward("k", g, "kv_heads"), inward("v", g, "kv_heads")
        self.out = Projection("bthk,hkd->btd", (h, k, width), "attention.out", ("heads", None, "embed"),
                              bias="out" in config.bias, operands=operands)
        self.sinks = parameter((h,), "attention.sinks", ("heads",), constant=0.0) if config.sinks else None

        norm = lambda role, heads, axis: qk_norm(config.qk_norm, role, heads, axis, k)
        self.q_norm, self.k_norm = norm("q", h, "heads"), norm("k", g, "kv_heads")
        self.v_norm = norm("v", g, "kv_heads") if config.qk_norm.values else None
        temperature = lambda: parameter((h,), "qk_norm.temperature", ("heads",), constant=config.qk_norm.temperature)
        self.temperature = temperature() if config.qk_norm.kind == "l2" else None

    def __call__(self, x: Float[Array, "b t d"], positions: Int[Array, "t"], tap: Tap) -> Float[Array, "b t d"]:
        config = self.config
        q = self.turn(self.q(x), self.q_norm, positions)
        k = self.turn(self.k(x), self.k_norm, positions)
        v = self.clipped(self.v(x) if self.v_norm is None else self.v_norm(self.v(x)))
        scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
        if self.temperature is not None:
            q, scale = q * self.temperature[...].astype(q.dtype)[:, None], 1.0
        q, k, v = tap("attn.q", q), tap("attn.k", k), tap("attn.v", v)
        logits = {"scale": scale, "softcap": config.softcap, "window": config.window}
        heads, stats = attend(q, k, v, kernel=config.kernel, **logits, operands=self.operands,
                              sinks=None if self.sinks is None else self.sinks[...])
        for field, value in () if stats is None else stats._asdict().items():
            if value is not None:
                tap(f"attn.{field}", value)
        tap("attn.cosine", mean_cosine(q, k, config.window))
        tap("attn.rows", logit_rows(q, k, self.rows, **logits))
        return self.out(tap("attn.heads", heads))

    def turn(self, x: Float[Array, "b t h k"], norm: Norm | None, positions: Int[Array, "t"]) -> Float[Array, "b t h k"]:
        """Queries or keys after QK-norm and RoPE, in the configured order."""
        if self.config.qk_norm.kind == "l2":
            norm = lambda x: normalise(x, NormContract(kind="l2", eps=self.config.qk_norm.norm.eps))
        if norm is not None and self.config.qk_norm.position == "before":
            x = norm(x)
        x = rotate(self.clipped(x), positions, self.rope)
        if norm is not None and self.config.qk_norm.position == "after":
            x = norm(x)
        return x

    def clipped(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        limit = self.config.clip
        return x if limit is None else jnp.clip(x, -limit, limit)


def qk_norm(config, role: str, heads: int, axis: str, k: int) -> Norm | None:
    """The norm of queries, keys or values [b t heads k] that the config asks for."""
    if config.kind not in QK_NORMS:
        return None
    row = QK_NORMS[config.kind]
    shape, axes = ((heads, k), (axis, None)) if row["each"] else ((k,), (None,))
    return Norm(config.norm, shape, f"qk_norm.{role}", axes, row["over"])
