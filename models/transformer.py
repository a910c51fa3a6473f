"""The decoder: embed, stack, final norm, head."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.model import Model
from models.moe.balance import Routing
from models.norms import PLACEMENTS, Norm
from models.parameters import parameter
from models.precision import Operands
from models.projection import Projection, project
from models.sharding import constrain
from models.stack import Stack
from models.taps import Tap, Taps

NOTHING = Taps()


class Stream(NamedTuple):
    """What the output head reads; what the taps recorded by site, but for that of the logits; and the routing of each layer."""

    final: Float[Array, "b t d"]
    records: dict[str, Any]
    routing: list[Routing | None]


class Output(NamedTuple):
    """Logits; what the taps recorded by site (for a site of the layers, a sequence indexed by layer); and the routing of each layer, None
    for one that is no mixture."""

    logits: Float[Array, "b t v"]
    records: dict[str, Any]
    routing: list[Routing | None]


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
        self, tokens: Int[Array, "b t"], *, positions: Int[Array, "t"] | None = None, taps: Taps = NOTHING,
        counted: Bool[Array, "b t"] | None = None, key: Array | None = None, remat: str = "none",
    ) -> Output:
        """Logits of the next token at each position. `positions` (default 0, 1, …) may start anywhere; `remat` is a row of REMATS.

        Of mixtures: `counted` are the tokens that the routing counts (None: all), `key` draws the router's noise (None: no noise).
        """
        stream = self.stream(tokens, positions, taps, counted, key, remat)
        tap = taps.frame()
        logits = self.logits(stream.final, tap)
        return Output(logits, stream.records | tap.records, stream.routing)

    def stream(
        self, tokens: Int[Array, "b t"], positions: Int[Array, "t"] | None = None, taps: Taps = NOTHING,
        counted: Bool[Array, "b t"] | None = None, key: Array | None = None, remat: str = "none",
    ) -> Stream:
        """Everything but the output head, so that a loss may take the logits in parts."""
        if self.positions is not None and tokens.shape[1] > self.config.context:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens is longer than the learned positions, {self.config.context}")
        tap = taps.frame()
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        whole_width = constrain(self.embed[...], ("v", "d"))  # otherwise the look-up's output is laid out anew from scratch
        x = jnp.take(whole_width, tokens, axis=0)
        x = x if self.config.embedding_scale is None else x * jnp.asarray(self.config.embedding_scale, x.dtype)
        x = tap("embed", x if self.positions is None else x + jnp.take(constrain(self.positions[...], ("t", "d")), positions, axis=0))
        x, records, routing = self.stack(x, positions, taps, counted, key, remat)
        x = tap("resid.final", x if self.norm is None else self.norm(x))
        return Stream(x, records | tap.records, routing)

    def logits(self, x: Float[Array, "b t d"], tap: Tap) -> Float[Array, "b t v"]:
        """The output head."""
        logits = project("btd,dv->btv", x, self.embed[...].T, self.operands) if self.head is None else self.head(x)
        cap = self.config.softcap
        return tap("logits", logits if cap is None else cap * jnp.tanh(logits / cap))
