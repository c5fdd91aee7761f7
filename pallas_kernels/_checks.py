"""How do the entry points refuse wrong arguments? Shape and dtype checks with the argument's name; no state.

All of it runs while tracing, on static shapes, and costs nothing in the compiled program.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Raw cache words and the model dtype they are bitcast to. Opaque words, because XLA may rewrite NaN patterns of
# 16-bit floats that it only moves.
MODEL_DTYPE_OF_WORD = {
    jnp.dtype(jnp.uint32): jnp.dtype(jnp.float32),
    jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16),
}


def axes(
    kernel: str, arrays: Mapping[str, tuple[jax.Array, str]], sizes: dict[str, int] | None = None
) -> dict[str, int]:
    """Sizes by axis letter of `arrays` (name -> (array, its axis letters)).

    `sizes` are letters known beforehand. Raises ValueError where a rank or a size disagrees.
    """
    known = dict(sizes or {})
    for name, (array, letters) in arrays.items():
        if array.ndim != len(letters):
            raise ValueError(f"{kernel}: {name} must have axes {','.join(letters)}, got shape {array.shape}")
        for letter, size in zip(letters, array.shape, strict=True):
            if known.setdefault(letter, size) != size:
                raise ValueError(f"{kernel}: axis {letter} of {name} is {size}, expected {known[letter]}")
    return known


def floating(kernel: str, **arrays: jax.Array) -> None:
    """Raises ValueError for an array that is neither float32 nor bfloat16."""
    for name, array in arrays.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{kernel}: {name} must be float32 or bfloat16, got {array.dtype}")


def integer(kernel: str, **arrays: jax.Array) -> None:
    """Raises ValueError for an array that is not int32."""
    for name, array in arrays.items():
        if jnp.result_type(array) != jnp.int32:
            raise ValueError(f"{kernel}: {name} must be int32, got {jnp.result_type(array)}")


def of_dtype(kernel: str, dtype: jnp.dtype, **arrays: jax.Array) -> None:
    """Raises ValueError for an array of another dtype than `dtype`."""
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise ValueError(f"{kernel}: {name} must be {jnp.dtype(dtype).name}, got {array.dtype}")
