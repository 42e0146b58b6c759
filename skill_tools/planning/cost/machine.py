# SPDX-License-Identifier: Apache-2.0
"""The machine of a plan: rates of GPU, link and host, each with its source.

Either a known GPU out of `knowledge/hardware.yaml`, the four numbers of an unknown one, or a profile that
was measured on the machine itself. Rates are per GPU; resources that a node's ranks share are divided here, once.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload_arithmetic.states import BF16_BYTES, WHOLE, adam_bytes
from offload_arithmetic.update_time import host_bytes_per_s
from skill_tools import knowledge
from skill_tools.configs.files import read_bytes
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest
from skill_tools.started import COMMAND
from skill_tools.units import GIB

_RATES = (
    "bf16_matmul_TFLOPs",
    "h2d_pinned_GBs",
    "d2h_pinned_GBs",
    "duplex_total_GBs",
    "host_triad_GBs",
    "cpu_adam_fused_Gparam_s",
    "cpu_adam_perparam_fused_Gparam_s",
)
_UPDATE_RATES = ("cpu_with_copies_Gparam_s", "streamed_Gparam_s", "both_Gparam_s", "both_cpu_share")
_PROFILE_BYTES = 1 << 20
_SHOWN = 60
# A card's memory in the place of its name.
_AMOUNT = re.compile(r"\d+(?:\.\d+)?\s*(?:g|gb|gib)?", re.IGNORECASE)
_SIZES = (
    "hbm_GBs",
    "peer_GBs",
    "network_GBs",
    "staged_GBs",
    "launch_us",
    "gpu_memory_bytes",
    "host_memory_bytes",
    "pinned_memory_bytes",
    "gpus_per_node",
)

_NUMBERS = ("tflops", "link_GBs", "dram_GBs", "hbm_GBs")


class Machine(NamedTuple):
    """Rates in FLOP/s, bytes/s and parameters/s. `*_copy` are pinned copies of one direction alone.

    `duplex_copy` is one direction while the other runs too. `host_memory_bytes` is the share of the run's GPUs on one
    node, smaller than the node's if they do not fill it. `dram` is one rank's share of the node's host memory
    bandwidth, `cpu_adam` one rank's fused CPU AdamW. `hybrid` and `hybrid_overlap` are measured rates of Megatron's
    HybridDeviceOptimizer, copies included, or None. `update_link`, `update_dram` and `update_cpu` are the rates of the
    reference implementation's optimizer: on the link, one way, in host memory and on the cores. `staged_copy` is one
    direction of copies of pageable memory while the other runs too, 0 if not measured. `peers` is a rank's receiving
    rate in a collective inside a node, over the link if `peers_on_link`; `network` is its share of a node's receiving
    rate from other nodes. `launch_s` are the host's seconds to launch a kernel of an eager step, and `budget_extra` the
    extra time of an activation budget on real models, as a share of forward and backward. None stands for the value of
    `hardware.yaml`, if not measured. `measured`: the rates come from this machine. `stands_for` are the possible GPUs
    if none was named (`unnamed_gpu`). `has_bf16` is false for GPUs without bf16: their `gemm` is that of fp16.
    """

    name: str
    source: str
    gpu_memory_bytes: int
    host_memory_bytes: int
    gpus_per_node: int
    gemm: float
    hbm: float
    h2d_copy: float
    d2h_copy: float
    duplex_copy: float
    dram: float
    cpu_adam: float
    cpu_adam_per_tensor: float
    update_link: float
    update_dram: float
    update_cpu: float
    peers: float
    network: float
    peers_on_link: bool = False
    hybrid: float | None = None
    hybrid_overlap: float | None = None
    measured: bool = False
    stands_for: tuple[str, ...] = ()
    pinned_memory_bytes: int = 0
    staged_copy: float = 0.0
    launch_s: float | None = None
    budget_extra: float | None = None
    has_bf16: bool = True


def model_constants() -> Mapping[str, float]:
    """Return the constants of the time model, each with its source in `hardware.yaml`."""
    constants: Mapping[str, float] = knowledge.index()["hardware"]["model"]
    return constants


def known(name: str, *, ranks_on_node: int | None = None) -> Machine:
    """Return the known GPU called `name`, or read `tflops=..,link_GBs=..,dram_GBs=..,hbm_GBs=..`.

    Raises `UnusableInput` for a GPU that nobody wrote down, and asks for its four numbers.
    """
    data = knowledge.index()["hardware"]
    if "=" in name:
        return _of_numbers(name, data["model"])
    wanted = plain_name(name)
    found = _entry(wanted)
    if found is not None:
        key, gpu = found
        return _machine(key, gpu, data["hosts"][gpu["host"]], data["model"], ranks_on_node)
    near = nearest(wanted, data["gpus"], likeness=0.4) or list(data["gpus"])[:6]
    raise UnusableInput(
        f"GPU {name[:_SHOWN]!r} is not known",
        expected=f"one of {len(data['gpus'])} names, such as {', '.join(near)}, or its four numbers",
        attempt=f"--gpu-memory {name}"
        if _AMOUNT.fullmatch(name)
        else "--gpu tflops=989,link_GBs=55,dram_GBs=57,hbm_GBs=3350 (dense bf16; one way, pinned; a GPU's share)",
    )


def is_known(name: str) -> bool:
    """Return whether `known` finds a GPU of this name."""
    return _entry(plain_name(name)) is not None


def plain_name(name: object) -> str:
    """Return a GPU's name without maker, family, blanks and dashes: `NVIDIA GeForce RTX 4090` is `rtx4090`."""
    letters = re.sub(r"[^a-z0-9]", "", str(name).lower())
    return re.sub(r"^(?:nvidia|amd)?(?:geforce|tesla|instinct|quadro)?", "", letters)


def _machine(
    name: str, gpu: dict[str, Any], host: dict[str, Any], constants: dict[str, float], ranks: int | None
) -> Machine:
    beside = ranks or host["gpus"]
    # Ranks that are fewer than the links are taken to be spread over them.
    copied, both = (
        gpu[name] * 1e9 / max(beside / host.get("links", beside), 1) for name in ("link_gbs", "duplex_gbs")
    )
    share = min(1 / beside, constants["host_share"] / host["gpus"])
    dram = host["host_dram_gbs"] * 1e9 * share
    adam = dram / constants["cpu_adam_bytes"]
    rate, overlap = host.get("hybrid_optimizer_gparams"), host.get("hybrid_optimizer_overlap_gparams")
    return Machine(
        name=name,
        source=f"knowledge/hardware.yaml ({gpu['source']}; host {gpu['host']}: {host['source']})",
        gpu_memory_bytes=round(gpu["memory_gib"] * GIB),
        host_memory_bytes=round(host["memory_gib"] * GIB * min(beside / host["gpus"], 1)),
        gpus_per_node=host["gpus"],
        gemm=gpu["bf16_tflops"] * 1e12 * constants["gemm_share"],
        hbm=gpu["hbm_gbs"] * 1e9,
        h2d_copy=copied,
        d2h_copy=copied,
        duplex_copy=both,
        dram=dram,
        cpu_adam=adam,
        cpu_adam_per_tensor=adam * constants["per_tensor_share"],
        update_link=both,
        update_dram=dram,
        update_cpu=adam,
        **_peer_rates(gpu.get("peer_gbs"), copied, constants),
        network=host["network_gbs"] * 1e9 / host["gpus"],
        hybrid=None if rate is None else rate * 1e9,
        hybrid_overlap=None if overlap is None else overlap * 1e9,
        has_bf16=gpu.get("has_bf16", True),
    )


def _peer_rates(peer_gbs: float | None, link: float, constants: Mapping[str, float]) -> dict[str, Any]:
    """Return the rate of collectives inside a node: of NVLink or its like, else of the `link` to the host."""
    if peer_gbs is None:
        return {"peers": link * constants["peers_share_of_link"], "peers_on_link": True}
    return {"peers": peer_gbs * 1e9, "peers_on_link": False}


def _of_numbers(text: str, constants: dict[str, float]) -> Machine:
    try:
        given = {key.strip(): float(value) for key, value in (item.split("=") for item in text.split(","))}
    except ValueError:
        given = {}
    if set(given) != set(_NUMBERS) or any(value <= 0 for value in given.values()):
        raise UnusableInput(
            f"--gpu {text!r} does not give the four numbers",
            expected=f"{', '.join(f'{name}=N' for name in _NUMBERS)}, each above zero",
            attempt="--gpu tflops=989,link_GBs=55,dram_GBs=57,hbm_GBs=3350",
        )
    link, dram = given["link_GBs"] * 1e9, given["dram_GBs"] * 1e9
    adam = dram / constants["cpu_adam_bytes"]
    return Machine(
        name="custom GPU",
        source="--gpu",
        gpu_memory_bytes=0,
        host_memory_bytes=0,
        gpus_per_node=8,
        gemm=given["tflops"] * 1e12 * constants["gemm_share"],
        hbm=given["hbm_GBs"] * 1e9,
        h2d_copy=link,
        d2h_copy=link,
        duplex_copy=0.89 * link,
        dram=dram,
        cpu_adam=adam,
        cpu_adam_per_tensor=adam * constants["per_tensor_share"],
        update_link=0.89 * link,
        update_dram=dram,
        update_cpu=adam,
        **_peer_rates(None, link, constants),
        network=constants["network_gbs"] * 1e9,
    )


def from_profile(data: Mapping[str, Any], *, name: str, source: str) -> Machine:
    """Return the machine that a profile's `hardware` numbers describe: GB/s, Gparam/s and TFLOP/s, decimal."""
    _check_rates(data, source)
    return Machine(
        name=name,
        source=source,
        gpu_memory_bytes=round(data.get("gpu_memory_bytes", 0)),
        host_memory_bytes=round(data.get("host_memory_bytes", 0)),
        pinned_memory_bytes=round(data.get("pinned_memory_bytes", 0)),
        staged_copy=data.get("staged_GBs", 0) * 1e9,
        launch_s=data.get("launch_us", 0) / 1e6 * model_constants()["launch_factor"] or None,
        gpus_per_node=round(data.get("gpus_per_node", 1)),
        gemm=data["bf16_matmul_TFLOPs"] * 1e12,
        hbm=data.get("hbm_GBs", 4800) * 1e9,
        h2d_copy=data["h2d_pinned_GBs"] * 1e9,
        d2h_copy=data["d2h_pinned_GBs"] * 1e9,
        duplex_copy=data["duplex_total_GBs"] * 1e9 / 2,
        dram=data["host_triad_GBs"] * 1e9,
        cpu_adam=data["cpu_adam_fused_Gparam_s"] * 1e9,
        cpu_adam_per_tensor=data["cpu_adam_perparam_fused_Gparam_s"] * 1e9,
        measured=True,
        network=data.get("network_GBs", model_constants()["network_gbs"]) * 1e9,
        has_bf16=_known_gpu(data).get("has_bf16", True),
        **_peer_rates(_peer_gbs(data), data["h2d_pinned_GBs"] * 1e9, model_constants()),
        **_update_rates(data),
    )


def _peer_gbs(data: Mapping[str, Any]) -> float | None:
    """Return a profile's rate of collectives, else the known GPU's: a probe of one GPU does not find it."""
    if "peer_GBs" in data:
        return float(data["peer_GBs"])
    rate: float | None = _known_gpu(data).get("peer_gbs")
    return rate


def _known_gpu(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a profile's GPU, empty for an unknown one."""
    found = _entry(plain_name(data.get("gpu", "")))
    return found[1] if found else {}


def _entry(wanted: str) -> tuple[str, dict[str, Any]] | None:
    """Return the known GPU that is called `wanted`, a plain name, with its facts."""
    for key, gpu in knowledge.index()["hardware"]["gpus"].items():
        if wanted == plain_name(key) or wanted in map(plain_name, gpu["names"]):
            return key, gpu
    return None


def _check_rates(data: Mapping[str, Any], source: str) -> None:
    """Raise `UnusableInput` for a profile with a missing or impossible rate."""
    expected = "h2d_pinned_GBs, d2h_pinned_GBs, duplex_total_GBs and the other measured rates"
    attempt = f"{COMMAND} probe --out {source}, or --gpu NAME for rates that are known"
    missing = [name for name in _RATES if name not in data]
    if not missing and "streamed_Gparam_s" in data:
        missing = [name for name in _UPDATE_RATES if name not in data]
    if missing:
        raise UnusableInput(
            f"the machine profile {source} lacks {', '.join(missing)}", expected=expected, attempt=attempt
        )
    for name in {*_RATES, *_UPDATE_RATES, *_SIZES} & set(data):
        value = data[name]
        least = 0 if name in {"both_cpu_share", *_SIZES} else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            raise UnusableInput(
                f"the machine profile {source} says {name} = {value!r}",
                expected="a number above zero",
                attempt=attempt,
            )


def _update_rates(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of the reference implementation's optimizer here, or where none was measured, its limits.

    Whole updates with their copies were timed: on the CPU, streamed, and `both_cpu_share` of them at once on the CPU.
    Their bytes bound the link from below, and host memory by the busiest of the three.
    """
    if "streamed_Gparam_s" not in data:
        adam, link = data["cpu_adam_fused_Gparam_s"] * 1e9, data["duplex_total_GBs"] * 1e9 / 2
        return {"update_link": link, "update_dram": 28 * adam, "update_cpu": adam}
    cpu, streamed, share = data["cpu_with_copies_Gparam_s"], data["streamed_Gparam_s"], data["both_cpu_share"]
    each = adam_bytes(BF16_BYTES, WHOLE)
    dram = host_bytes_per_s(
        each,
        cpu_per_s=cpu,
        streamed_per_s=streamed,
        both_per_s=data["both_Gparam_s"],
        cpu_share=share,
    )
    return {
        "update_link": each.streamed * streamed * 1e9,
        "update_dram": dram * 1e9,
        "update_cpu": cpu * 1e9,
    }


def read_profile(path: str, *, ranks: int = 1) -> Machine:
    """Return one of `ranks`' part of a host, by the profile in `path`, which one process has measured alone.

    The file is a JSON object of rates, or one with them under `hardware`.
    """
    expected, attempt = "a JSON object of measured rates", "--gpu NAME, for rates that are known"
    text = read_bytes(path, _PROFILE_BYTES, expected=expected, attempt=attempt)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"the machine profile {path} cannot be read ({error})"
        raise UnusableInput(problem, expected=expected, attempt=attempt) from None
    hardware = data.get("hardware", data) if isinstance(data, dict) else {}
    found = from_profile(hardware, name=str(hardware.get("gpu", path)), source=path)
    return found._replace(
        dram=found.dram / ranks,
        cpu_adam=found.cpu_adam / ranks,
        cpu_adam_per_tensor=found.cpu_adam_per_tensor / ranks,
        update_dram=found.update_dram / ranks,
        staged_copy=found.staged_copy / ranks,
        update_cpu=found.update_cpu / ranks,
    )
