"""The decoder: embed, stack, final norm, head."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.model import Model
from models.norms import PLACEMENTS, Norm
from models.parameters import parameter
from models.precision import Operands
from models.projection import Projection, project
from models.sharding import constrain
from models.stack import Stack
from models.taps import Taps


class Output(NamedTuple):
    """Logits, and what the taps recorded by site: for a site of the layers, a sequence indexed by layer."""

    logits: Float[Array, "b t v"]
    records: dict[str, Any]


class Transformer(nnx.Module):
    """A decoder-only transformer, without values until `models.init.initialise` or `models.parameters.bind` gives them.

    `operands` is the precision of the factors of every matrix product; `rows` the query rows at site "attn.rows".
    """

    def __init__(self, config: Model, *, operands: Operands = "float32", rows: int = 16):
        self.config, self.operands = config, operands
        self.embed = parameter((config.vocab, config.width), "embed", ("vocab", "embed"), fan=(config.vocab, config.width))
        learned = lambda: parameter((config.context, config.width), "positions", (None, "embed"), fan=(config.context, config.width))
        self.positions = learned() if config.learned_positions else None
        self.stack = Stack(config, rows, operands)
        final = PLACEMENTS[config.norm.placement].final if config.norm.final is None else config.norm.final
        self.norm = Norm(config.norm, (config.width,), "norm.final", ("embed",)) if final else None
        head = lambda: Projection("btd,dv->btv", (config.width, config.vocab), "head", ("embed", "vocab"), operands=operands)
        self.head = None if config.tied else head()

    def __call__(
        self, tokens: Int[Array, "b t"], *, positions: Int[Array, "t"] | None = None, taps: Taps | None = None, remat: str = "none"
    ) -> Output:
        """Logits of the next token at each position. `positions` (default 0, 1, …) may start anywhere; `remat` is a row of REMATS."""
        context = self.config.context
        if context is not None and tokens.shape[1] > context:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens: model.context = {context} is the longest this model is made for")
        taps = Taps() if taps is None else taps
        tap = taps.frame()
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        whole_width = constrain(self.embed[...], ("v", "d"))  # otherwise the look-up's output is laid out anew from scratch
        x = jnp.take(whole_width, tokens, axis=0)
        x = x if self.config.embedding_scale is None else x * jnp.asarray(self.config.embedding_scale, x.dtype)
        x = tap("embed", x if self.positions is None else x + jnp.take(constrain(self.positions[...], ("t", "d")), positions, axis=0))
        x, records = self.stack(x, positions, taps, remat)
        x = tap("resid.final", x if self.norm is None else self.norm(x))
        logits = project("btd,dv->btv", x, self.embed[...].T, self.operands) if self.head is None else self.head(x)
        cap = self.config.softcap
        logits = tap("logits", logits if cap is None else cap * jnp.tanh(logits / cap))
        return Output(logits, records | tap.records)
