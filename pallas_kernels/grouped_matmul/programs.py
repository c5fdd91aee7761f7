"""Which calls do the cases make? The programs of the experts, for compiles, benchmarks, tuner and tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul
from pallas_kernels._programs import Program, Shape
from pallas_kernels.grouped_matmul.cases import CASES, Case


def programs() -> list[Program]:
    return [_experts(case, t) for case in CASES for t in case.tokens]


def _experts(case: Case, t: int) -> Program:
    dtype = jnp.dtype(case.dtype)
    in_use = case.experts * (1 - (1 - case.choices / case.experts) ** t)
    weights = 3 * case.hidden * case.width

    def ids(rng: np.random.Generator) -> np.ndarray:
        return np.stack([rng.permutation(case.experts)[: case.choices] for _ in range(t)])

    return Program(
        "grouped_matmul",
        f"experts_{t}",
        case.name,
        grouped_matmul.experts_swiglu,
        {
            "x_th": Shape((t, case.hidden), dtype),
            "gate_up_e2ih": Shape((case.experts, 2, case.width, case.hidden), dtype),
            "down_ehi": Shape((case.experts, case.hidden, case.width), dtype),
            "expert_ids_tk": Shape((t, case.choices), jnp.int32),
            "expert_weights_tk": Shape((t, case.choices), jnp.float32),
        },
        tags=case.tags,
        values={"expert_ids_tk": ids},
        moved_bytes=int((in_use * weights + 2 * t * case.hidden) * dtype.itemsize),
        operations=2 * t * case.choices * weights,
    )
