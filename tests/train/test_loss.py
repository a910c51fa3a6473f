"""The next-token loss against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.small import SAME
from train.loss import next_token_loss

B, T, V = 2, 3, 7


def draw(seed: int = 0):
    random = np.random.default_rng(seed)
    return random.normal(size=(B, T, V)).astype(np.float32), random.integers(0, V, (B, T)).astype(np.int32)


def reference(logits, targets, z_loss):
    """(total, cross entropy, squared log Z) in float64."""
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    cross_entropy = (log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()
    return cross_entropy + z_loss * (log_z**2).mean(), cross_entropy, (log_z**2).mean()


@pytest.mark.parametrize("vocab", [2, 48, 256])
def test_no_knowledge_costs_log_v(vocab):
    """Equal logits give a cross entropy of log v nats and log Z = log v, whatever the targets."""
    loss = next_token_loss(jnp.zeros((B, T, vocab)), jnp.ones((B, T), jnp.int32), z_loss=0.5)
    np.testing.assert_allclose(loss.cross_entropy, np.log(vocab), rtol=SAME)
    np.testing.assert_allclose(loss.squared_log_z, np.log(vocab) ** 2, rtol=SAME)
    np.testing.assert_allclose(loss.total, np.log(vocab) + 0.5 * np.log(vocab) ** 2, rtol=SAME)


@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.3])
def test_loss_is_its_formula(z_loss):
    """The total is the mean of log Z - z[target] plus z_loss times the mean of (log Z)^2."""
    logits, targets = draw()
    loss = next_token_loss(jnp.asarray(logits), jnp.asarray(targets), z_loss)
    np.testing.assert_allclose(loss, reference(logits, targets, z_loss), rtol=SAME)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_gradient_is_softmax_minus_target(z_loss):
    """d total / d z = (p - onehot + 2 z_loss log Z p) / tokens."""
    logits, targets = draw(1)
    p = np.exp(logits.astype(np.float64))
    log_z = np.log(p.sum(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = (p - np.eye(V)[targets] + 2 * z_loss * log_z * p) / (B * T)
    gradient = jax.grad(lambda z: next_token_loss(z, jnp.asarray(targets), z_loss).total)(jnp.asarray(logits))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=SAME)


@pytest.mark.parametrize("shift", [-3.0, 50.0])
def test_a_shift_of_all_logits_is_seen_by_log_z_alone(shift):
    """Adding c to every logit leaves the cross entropy and adds c to log Z, which is what z-loss holds in place."""
    logits, targets = draw(2)
    before, after = (next_token_loss(jnp.asarray(x, jnp.float32), jnp.asarray(targets)) for x in (logits, logits + np.float32(shift)))
    atol = SAME * (abs(shift) + np.abs(logits).max())
    np.testing.assert_allclose(after.cross_entropy, before.cross_entropy, rtol=0, atol=atol)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1)) + shift
    np.testing.assert_allclose(after.squared_log_z, (log_z**2).mean(), rtol=SAME)
