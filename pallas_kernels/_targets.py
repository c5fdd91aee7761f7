"""Which chips are kernels compiled for without the chip? Their public data-sheet facts; data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Facts that XLA's GPU compiler asks for, in the words of its GpuTargetConfigProto. Sizes in bytes."""

    device_kind: str
    major: int
    minor: int
    feature_extension: str
    cores: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    threads_per_core: int
    l2_bytes: int
    memory_bytes: int
    bytes_per_s: int
    clock_ghz: float

    def target_config(self) -> str:
        """The text proto."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  threads_per_core_limit: {self.threads_per_core} core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bytes_per_s} l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes}
  clock_rate_ghz: {self.clock_ghz}
  cuda_compute_capability {{
    major: {self.major} minor: {self.minor} feature_extension: {self.feature_extension}
  }}
  name: "{self.device_kind}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.device_kind}"
"""


# Triton builds sm_120 and sm_121 without extensions; Mosaic GPU would need ACCELERATED_FEATURES there.
GPUS = {
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", 9, 0, "ACCELERATED_FEATURES", 132, 233472, 232448, 2048),
        *(52428800, 84942979072, 3352320000000, 1.98),
    ),
    "b200": Gpu(
        *("NVIDIA B200", 10, 0, "ACCELERATED_FEATURES", 148, 233472, 232448, 2048),
        *(132644864, 191514411008, 7672320000000, 1.965),
    ),
    "rtx-pro-6000": Gpu(
        *("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0, "NONE", 188, 131072, 101376, 1536),
        *(134217728, 103079215104, 1792000000000, 2.6),
    ),
    "gb10": Gpu(
        *("NVIDIA GB10", 12, 1, "NONE", 48, 131072, 101376, 1536),
        *(25165824, 137438953472, 273000000000, 2.4),
    ),
}

# Topology names of libtpu.
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
