"""JAX as strict as it gets: eight host devices, no silent promotion, shapes checked at run time; compiled programs outlive a run."""

import os
from pathlib import Path

from tests import QUICK

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {QUICK}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jaxtyping
import pytest

ROOT = Path(__file__).parent.parent

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jaxtyping.install_import_hook(["models", "train"], "beartype.beartype")


@pytest.fixture
def x64():
    """Float64 is available, and the default."""
    with jax.enable_x64(True):
        yield
