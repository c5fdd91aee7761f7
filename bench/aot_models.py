"""Do whole models compile for chips that are not here, in place? `python -m bench.aot_models --target h100 --json`.

One decode step and one prefill step of each family, at its real widths with few layers, on one device and on four: the
very programs that the engine declares (runtime/steps.py). As `python -m pallas_kernels.aot`, in the environment that
`make aot` makes, one process a target. A program fails where it does not compile, where the donated state does not
come back in its own memory, or where a whole array of pages is copied. Nothing runs: no speed and no results are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from typing import Any

from pallas_kernels._targets import GPUS, TPUS

# config.json of each family at its public widths, fewer layers of each kind; a new family is one line.
_QWEN_HYBRID = dict(
    **dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, head_dim=256),
    **dict(
        layer_types=["linear_attention", "full_attention"], max_position_embeddings=262144, rope_theta=1e7
    ),
)
_MOE = dict(num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(  # 8B
        **dict(model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288),
        **dict(num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
        **dict(max_position_embeddings=40960, rope_theta=1e6),
    ),
    "qwen3_next": dict(  # 80B-A3B
        **{**_QWEN_HYBRID, **_MOE},
        **dict(model_type="qwen3_next", num_key_value_heads=2, num_experts=512, num_nextn_predict_layers=1),
    ),
    "qwen3_5": dict(  # 9B
        **{**_QWEN_HYBRID, "vocab_size": 248320, "hidden_size": 4096},
        **dict(model_type="qwen3_5", num_key_value_heads=4, intermediate_size=12288, mtp_num_hidden_layers=1),
    ),
    "qwen3_5_moe": dict(  # 35B-A3B
        **{**_QWEN_HYBRID, **_MOE, "vocab_size": 248320, "num_experts_per_tok": 8},
        **dict(model_type="qwen3_5_moe", num_key_value_heads=2, num_experts=256, mtp_num_hidden_layers=1),
    ),
    "kimi_linear": dict(  # 48B-A3B
        **dict(model_type="kimi_linear", vocab_size=163840, hidden_size=2304, intermediate_size=9216),
        **dict(num_hidden_layers=2, num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128),
        **dict(qk_rope_head_dim=64, v_head_dim=128, num_experts=256, num_experts_per_token=8),
        **dict(moe_intermediate_size=1024, num_shared_experts=1, first_k_dense_replace=1),
        **dict(routed_scaling_factor=2.446, model_max_length=1048576),
        linear_attn_config=dict(num_heads=32, head_dim=128, kda_layers=[1], full_attn_layers=[2]),
    ),
    "glm5_next": dict(  # 5.3-Flash
        **dict(model_type="glm5_next_text", vocab_size=154880, hidden_size=4096, intermediate_size=12288),
        **dict(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"]),
        **dict(num_attention_heads=64, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=256),
        **dict(qk_rope_head_dim=0, v_head_dim=256, n_routed_experts=288, num_experts_per_tok=8),
        **dict(
            moe_intermediate_size=2048, first_k_dense_replace=1, index_kpool=4, num_nextn_predict_layers=1
        ),
        **dict(routed_scaling_factor=2.5, max_position_embeddings=1048576),
    ),
    "deepseek_v4": dict(  # V4-Flash
        **dict(model_type="deepseek_v4", vocab_size=129280, hidden_size=4096, num_hidden_layers=3),
        **dict(num_attention_heads=64, num_key_value_heads=1, head_dim=512, q_lora_rank=1024),
        **dict(qk_rope_head_dim=64, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=6),
        **dict(sliding_window=128, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128),
        **dict(index_topk=512, compress_ratios=[0, 4, 128, 0], num_hash_layers=1, num_nextn_predict_layers=1),
        **dict(rope_scaling=dict(factor=16, original_max_position_embeddings=65536)),
        **dict(routed_scaling_factor=1.5, max_position_embeddings=1048576),
    ),
}
# Not compiled for an absent chip yet: no report under bench/results/aot/ has them. `--family` names them.
UNRECORDED = frozenset({"kimi_linear", "glm5_next", "deepseek_v4"})
RANKS = (1, 4)
STEPS = ("decode", "prefill")
_DECODE_ROWS, _TILE_TOKENS, _TABLE_PAGES, _N_SLOTS = 8, 512, 128, 16
_ARENA_BYTES = 1 << 30  # of one device; larger than everything else that a step may need


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 if every program passes its gate."""
    parser = argparse.ArgumentParser(prog="python -m bench.aot_models", description=__doc__)
    parser.add_argument("--target", required=True, choices=sorted(GPUS | TPUS))
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one (repeatable)")
    parser.add_argument("--ranks", action="append", type=int, choices=RANKS, help="only these (repeatable)")
    parser.add_argument("--step", action="append", choices=STEPS, help="only these (repeatable)")
    parser.add_argument(
        "--kernels", choices=("xla", "chip"), default="chip", help="chip: the target's Pallas kernels"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is first used (pallas_kernels/aot.py)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    report = compile_all(args)
    if args.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        for row in report["programs"]:
            print(" ".join(f"{key}={value}" for key, value in row.items()))
        print(f"{report['failed']} of {len(report['programs'])} programs fail for {args.target}")
    return 1 if report["failed"] else 0


def compile_all(args: argparse.Namespace) -> dict[str, Any]:
    """The report: a row a program."""
    from pallas_kernels import aot

    target = aot.gpu_target if args.target in GPUS else aot.tpu_target
    rows = []
    for ranks in args.ranks or RANKS:
        devices, _, backend = target(args.target, ranks)
        for family in args.family or [name for name in FAMILIES if name not in UNRECORDED]:
            for step in args.step or STEPS:
                kernels = backend if args.kernels == "chip" else args.kernels
                rows.append(_compile(family, step, kernels, backend, devices))
    return {
        "target": args.target,
        "device_kind": devices[0].device_kind,
        "versions": aot.versions(),
        "failed": sum(bool(row["fails"]) for row in rows),
        "programs": rows,
    }


def _compile(family: str, step: str, kernels: str, platform: str, devices: Any) -> dict[str, Any]:
    import jax

    row: dict[str, Any] = dict(family=family, ranks=len(devices), step=step, kernels=kernels)
    began_s = time.perf_counter()
    try:
        program, pages = _program(family, step, kernels, devices)
        jitted = jax.jit(
            program.function, donate_argnums=program.donated_index, out_shardings=program.out_shardings
        )
        lowering = {"lowering_platforms": ("cuda",)} if platform == "gpu" else {}
        # No context names the target, as in aot.py: kernels run inside shard_map, over a mesh of the target's devices.
        compiled = jitted.trace(*program.arguments).lower(**lowering).compile()
    except Exception as error:  # the report says which, and the gate fails
        return row | {"fails": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    memory = compiled.memory_analysis()
    row |= dict(
        compile_s=round(time.perf_counter() - began_s, 1),
        arguments_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        donated_bytes=_local_bytes(program.arguments[program.donated_index]),
        aliased_bytes=memory.alias_size_in_bytes,
        pages_bytes=_local_bytes(pages),
        page_copies=page_copies(compiled.as_text(), pages.shape[1:]),
    )
    return row | {"fails": failure(row)}


def _program(family: str, step: str, kernels: str, devices: Any) -> tuple[Any, Any]:
    """The engine's own program, and the abstract arena."""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from model.cache_layout import cache_layout
    from model.config import parse_config
    from model.decoder import declare_decoder
    from model.params import MESH_AXIS, Plan, abstract_params
    from model.state import abstract_state
    from model.static import Static
    from runtime.steps import StepShapes, declare_programs, decode_name, prefill_name

    config = parse_config(FAMILIES[family], eos_token_id=0)
    plan, dtype = Plan.of(config, len(devices)), jnp.dtype(jnp.bfloat16)
    mesh = Mesh(np.array(devices), (MESH_AXIS,))
    layout = cache_layout(config, plan, dtype)
    static = Static(config, plan, layout, mesh, backend=kernels)
    shapes = StepShapes(
        n_pages=_ARENA_BYTES // layout.page_bytes,
        n_slots=_N_SLOTS,
        table_pages=_TABLE_PAGES,
        grid_tokens=_TILE_TOKENS,
        page_tokens=layout.page_tokens,
        prefill_budget_tokens=2 * _TILE_TOKENS,
        decode_buckets_rows=(_DECODE_ROWS,),
    )
    params = abstract_params(declare_decoder(config, plan), plan, mesh, dtype)
    name = decode_name(_DECODE_ROWS) if step == "decode" else prefill_name(_TILE_TOKENS)
    pages = abstract_state(static, shapes.n_pages, shapes.n_slots).pages_rnw
    return declare_programs(static, params, shapes)[name], pages


def _local_bytes(tree: Any) -> int:
    """Bytes on one device."""
    import jax
    import numpy as np

    def leaf(array: Any) -> int:
        shape = array.sharding.shard_shape(array.shape)
        return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize

    return sum(leaf(array) for array in jax.tree.leaves(tree))


def page_copies(text: str, page_axes: tuple[int, ...]) -> int:
    """How often the compiled program copies an array of all pages: one with these axes, whatever ones are before."""
    sizes = ",".join(str(size) for size in page_axes)
    return len(re.findall(rf"= \(?\S*\[(?:1,)*{sizes}\]\S* (?:.*\) )?copy(?:-start)?\(", text))


def failure(row: dict[str, Any]) -> str | None:
    """Why this row fails the gate; None if it passes."""
    if row["page_copies"]:
        return f"the arena is copied {row['page_copies']} times"
    if row["aliased_bytes"] < row["donated_bytes"]:
        return "the donated state is not changed in place"
    if row["temporary_bytes"] >= row["pages_bytes"]:
        return f"temporaries of {row['temporary_bytes']} bytes hold a whole arena"
    return None


if __name__ == "__main__":
    sys.exit(main())
