"""The training floor runs with JAX's usual promotion: optax raises a float to an int32 count, which strict promotion refuses."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
