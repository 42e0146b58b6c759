"""A measured machine, for people: one line a rate. It reads the document of `schema/profile.schema.json`."""

from collections.abc import Mapping
from typing import Any

from skill_tools.units import gib

_RATES = (
    ("D2H, pinned", "d2h_pinned_GBs", "GB/s"),
    ("H2D, pinned", "h2d_pinned_GBs", "GB/s"),
    ("both ways at once", "duplex_total_GBs", "GB/s"),
    ("pinning", "pin_GBs", "GB/s"),
    ("host memory, triad", "host_triad_GBs", "GB/s"),
    ("device memory, copy", "hbm_GBs", "GB/s"),
    ("bf16 matrix product", "bf16_matmul_TFLOPs", "TFLOP/s"),
    ("CPU update, best", "cpu_adam_fused_Gparam_s", "1e9 parameters/s"),
    ("torch fused AdamW, a call a tensor", "cpu_adam_perparam_fused_Gparam_s", "1e9 parameters/s"),
    ("CPU update with copies", "cpu_with_copies_Gparam_s", "1e9 parameters/s"),
    ("streamed update", "streamed_Gparam_s", "1e9 parameters/s"),
    ("both updates at once", "both_Gparam_s", "1e9 parameters/s"),
    ("disk write", "disk_write_GBs", "GB/s"),
    ("disk read", "disk_read_GBs", "GB/s"),
)


def concise(document: Mapping[str, Any]) -> str:
    """Return the document as plain text."""
    found = document["hardware"]
    threads = ", ".join(f"{each['threads']}: {each['Gparam_s']:.2f}" for each in found["cpu_adam_by_threads"])
    return "\n".join(
        [
            f"{found['gpu']} ({gib(found['gpu_memory_bytes'])}), {found['cpus']} cores, "
            f"{gib(found['host_memory_bytes'])} of host memory free, torch {found['torch']}",
            *(f"  {name:<36}{found[key]:>9.2f} {unit}" for name, key, unit in _RATES),
            f"  CPU update by threads: {threads}",
            f"measured in {document['probe_s']:.1f} s",
        ]
    )
