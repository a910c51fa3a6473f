"""The knobs of a mixture of experts: who is sent where, how the load is balanced, and how the experts are computed."""

from dataclasses import dataclass
from typing import Literal

from configs.knobs import require

MOST = 2**16
"""Experts: above it a number is a slip."""


@dataclass(frozen=True)
class Moe:
    """A mixture of experts in place of the MLP; each expert is an MLP as `mlp` describes it, of width `width`."""

    experts: int | None = None
    """Number of experts. None: one dense MLP."""
    top_k: int = 2
    """Experts that a token is sent to; with choice expert their mean number."""
    width: int | None = None
    """Hidden width of an expert. None: mlp.width."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores."""
    normalise: bool = True
    """Divide the chosen scores by their sum; with router softmax this is the softmax taken after the choice, of the chosen logits alone."""
    selection_bias: bool = False
    """A bias per expert that takes part in the choice and does not weigh."""
    shared: int = 0
    """Experts that every token is sent to, beside the chosen, as one MLP of `shared` times the width."""
    bias: bool = False
    """A bias on the router logits."""
    choice: Literal["token", "expert"] = "token"
    """token: each token takes its top_k experts; expert: each expert takes its share of the tokens of a sequence, later ones included."""
    groups: int | None = None
    """Groups of neighbouring experts, of which a token uses only the best group_top_k. None: no groups."""
    group_top_k: int | None = None
    """Groups that a token may use: those with the largest sum of their two best scores."""
    jitter: float | None = None
    """In training the router's input is multiplied by noise that is uniform in [1 - jitter, 1 + jitter]. None: off."""
    bias_rate: float | None = None
    """How far the selection bias moves after each step, up for experts below the mean load and down for those above. None: it stays."""
    balance: float | None = None
    """Weight of the balance loss, which is 1 for an even load. None: off."""
    balance_over: Literal["batch", "sequence"] = "batch"
    """Tokens over which the load is to be even: those of a part of the batch, on all devices, or those of each sequence."""
    z_loss: float | None = None
    """Weight of the mean of (log sum exp router logits)^2. None: off."""
    dispatch: Literal["dense", "capacity", "dropless"] = "dropless"
    """dense: every expert sees every token; capacity: fixed slots for each expert and sequence, what finds none is dropped; dropless:
    tokens sorted by expert. Where nothing is dropped the numbers are the same."""
    capacity: float = 1.25
    """capacity: slots as a multiple of those that an even load needs."""

    def __post_init__(self):
        require(self.experts is None or 0 < self.experts <= MOST,
                f"moe.experts = {self.experts}: must be positive and at most {MOST}, or None for a dense MLP")
        require(self.width is None or self.width > 0, f"moe.width = {self.width}: must be positive, or None for mlp.width")
        require(self.shared >= 0, f"moe.shared = {self.shared}: must not be negative")
        require(self.capacity >= 1, f"moe.capacity = {self.capacity}: must be at least 1; below it even an even load finds too few slots")
        require(self.jitter is None or 0 < self.jitter < 1, f"moe.jitter = {self.jitter}: must lie between 0 and 1, or None for off")
        for knob in ("bias_rate", "balance", "z_loss"):
            value = getattr(self, knob)
            require(value is None or value >= 0, f"moe.{knob} = {value}: must not be negative, or None for off")
        require(self.selection_bias or not self.bias_rate,
                f"moe.bias_rate = {self.bias_rate}: there is no bias to adjust; set moe.selection_bias to True")
        require((self.groups is None) == (self.group_top_k is None),
                f"moe.groups = {self.groups} and moe.group_top_k = {self.group_top_k}: both or neither must be set")
        if self.experts is not None:
            require(0 < self.top_k <= self.experts, f"moe.top_k = {self.top_k}: must lie between 1 and moe.experts = {self.experts}")
            if self.groups is not None:
                self.check_groups()
            if self.choice == "expert":
                self.check_choice_of_experts()

    def check_groups(self) -> None:
        sizes = [n for n in range(1, self.experts + 1) if self.experts % n == 0]
        require(self.groups in sizes, f"moe.groups = {self.groups}: must divide moe.experts = {self.experts}; "
                                      f"the nearest is {min(sizes, key=lambda n: abs(n - self.groups))}")
        require(0 < self.group_top_k <= self.groups,
                f"moe.group_top_k = {self.group_top_k}: must lie between 1 and moe.groups = {self.groups}")
        reach = self.group_top_k * self.experts // self.groups
        require(self.top_k <= reach, f"moe.top_k = {self.top_k}: moe.group_top_k = {self.group_top_k} groups have only {reach} experts")

    def check_choice_of_experts(self) -> None:
        given = "with moe.choice = 'expert'"
        require(not self.normalise, f"moe.normalise = True {given}: a token may be chosen by none and have no sum; set it to False")
        require(not self.selection_bias, f"moe.selection_bias = True {given}: it adds the same to all tokens; set it to False")
        require(self.groups is None, f"moe.groups = {self.groups} {given}: tokens are chosen, not experts; set both group knobs to None")
        require(not self.balance, f"moe.balance = {self.balance} {given}: every load is even already; set it to None")
