"""Specifications of GPUs from their data sheets: dense rates, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toolkit.errors import PlanError

GB, TB, TFLOPS = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth: memory bytes per second. flops: bf16 operations per second; a multiply-add is two.

    flops_8: the same in fp8; None if not supported. link: bytes per second to a GPU of the same node, one way. network:
    the same to other nodes (one NIC per GPU).
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    flops_8: float | None
    link: float
    network: float = 50 * GB  # 400 Gbit/s InfiniBand per GPU, as in the published cases

    def rate(self, weight_bits: float) -> float:
        """Return operations per second for weights of so many bits; below 8 bits they are converted to bf16 first."""
        return self.flops_8 if weight_bits == 8 and self.flops_8 is not None else self.flops


# From NVIDIA's data sheets of the SXM (HGX) parts; L40S: PCIe 4.0 x16, and 200 Gbit/s InfiniBand per GPU. Memory uses
# 1 GB = 1e9 bytes; the parts have slightly more, so plans err on the safe side.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80 * GB, 2.039 * TB, 312 * TFLOPS, None, 300 * GB, 25 * GB),
        Gpu("H20", 96 * GB, 4.0 * TB, 148 * TFLOPS, 296 * TFLOPS, 450 * GB),
        Gpu("H100", 80 * GB, 3.35 * TB, 989 * TFLOPS, 1979 * TFLOPS, 450 * GB),
        Gpu("H200", 141 * GB, 4.8 * TB, 989 * TFLOPS, 1979 * TFLOPS, 450 * GB),
        Gpu("B200", 180 * GB, 7.7 * TB, 2250 * TFLOPS, 4500 * TFLOPS, 900 * GB),
        Gpu("L40S", 48 * GB, 0.864 * TB, 362 * TFLOPS, 733 * TFLOPS, 32 * GB, 25 * GB),
    )
}
# Fields that users may give, in the units of data sheets: field -> factor.
UNITS = {"memory": GB, "bandwidth": GB, "flops": TFLOPS, "flops_8": TFLOPS, "link": GB, "network": GB}
NEEDED = ("memory", "bandwidth", "flops")


def gpu_named(name: str, stated: dict[str, float] | None = None) -> Gpu:
    """Return a GPU of the table, or another one. `stated` figures (GB, GB/s, TFLOPS) override those of the table.

    Raises `PlanError` for figures that are not above 0, and when an unknown GPU lacks figures.
    """
    own: dict[str, Any] = {key: value * UNITS[key] for key, value in (stated or {}).items()}
    wrong = [key for key, value in own.items() if value <= 0]
    if wrong:
        raise PlanError(f"{', '.join(wrong)} of the GPU must be above 0")
    known = next((gpu for key, gpu in GPUS.items() if key.lower() == name.lower()), None)
    if known is not None:
        return replace(known, **own)
    lacking = [key for key in NEEDED if key not in own]
    if lacking:
        raise PlanError(
            f"GPU {name!r} is not in the table ({', '.join(GPUS)}); give --gpu-memory GB, --gpu-bandwidth GB/s and "
            f"--gpu-tflops of bf16 (missing: {', '.join(lacking)})"
        )
    return Gpu(name, **{"flops_8": None, "link": 32 * GB, **own})
