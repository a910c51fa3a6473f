"""Decoder-only transformers with the choice and the place of every norm as configuration.

Axes, in signatures and einsum strings: `b` batch, `t` query time, `s` key time, `d` model width, `h` query heads, `g` key and
value heads, `r` query heads per key head, `k` head width, `f` hidden width of the MLP, `e` experts, `v` vocabulary, `l` layers.
"""
