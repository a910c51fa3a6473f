"""JAX's own attention: cuDNN's fused kernel on a GPU with 16-bit operands, otherwise XLA's, which holds the logits."""

import jax
import jax.numpy as jnp

from models.kernels.scores import first_key_mass, same_document, visible


def library(q, k, v, *, scale, softcap, window, sinks, segments, offset, operands):
    """See `models.kernels.attend`. Gives neither `max` nor `entropy`, and `lse` and `sink` only where its residual is float32 or wider.

    Raises ValueError for a soft cap or learned sinks, which it does not offer.
    """
    if softcap is not None or sinks is not None:
        raise ValueError("attention.kernel = 'library' has neither softcap nor sinks; use 'chunked'")
    dtype, (t, s) = v.dtype, (q.shape[1], k.shape[1])
    q, k, v = (x.astype(jnp.bfloat16 if operands == "bfloat16" else x.dtype) for x in (q, k, v))
    if t == s and segments is None:
        masks = {"is_causal": True, "local_window_size": None if window is None else (window - 1, 0)}
    else:
        rows = offset + jnp.arange(t, dtype=jnp.int32)
        mask = visible(rows, s, window)[None]
        masks = {"mask": (mask if segments is None else mask & same_document(segments, rows, s))[:, None]}
    fused = jax.default_backend() == "gpu" and q.dtype.itemsize == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= 128
    implementation = "cudnn" if fused else "xla"
    out, lse = jax.nn.dot_product_attention(q, k, v, scale=scale, **masks, implementation=implementation, return_residual=True)
    if lse.dtype.itemsize < 4:
        return out.astype(dtype), (None, None, None, None)
    sink = first_key_mass(q, k, lse, scale=scale, softcap=None, window=window, segments=segments, offset=offset)
    return out.astype(dtype), (None, lse, None, sink)
