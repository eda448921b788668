"""Facts about one machine alone: its interfaces, versions and variables, and what cannot be tested."""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from towpath.doctor.interfaces import Interface, gloo_choice, interfaces, nccl_choice
from towpath.version import __version__

_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_DRIVER = Path("/proc/driver/nvidia/version")
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def machine_facts() -> dict[str, Any]:
    """Return what this machine reports, as JSON."""
    found = interfaces()
    gloo = gloo_choice(found)
    on_gpus = _DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") != ""
    return {
        "interfaces": found,
        "gloo": gloo,
        "training": nccl_choice(found) if on_gpus else gloo,
        "versions": _versions(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "load": os.getloadavg()[0],
        "notes": [*_adapters(found)],
        "clock": time.time(),
    }


def _versions() -> dict[str, str]:
    found = {"towpath": __version__}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if driver := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _word(_DRIVER) or ""):
        found["driver"] = driver[0]
    return found


# What cannot be tested from here, with the symptom that it is known for -----------------------------------------------


def _adapters(found: Sequence[Interface]) -> Iterator[str]:
    """Yield what NUMA nodes, the IOMMU and addresses for RDMA may do."""
    pci = [path for path in Path("/sys/bus/pci/devices").glob("*") if _word(path / "vendor") == "0x10de"]
    gpus = [_word(path / "numa_node") for path in pci if (_word(path / "class") or "").startswith("0x03")]
    for interface in found:
        node = _word(Path("/sys/class/net", interface["name"], "device/numa_node"))
        if far := sum(node not in (None, "-1", its) for its in gpus):
            yield (
                f"{interface['name']} is on NUMA node {node}, and {far} of {len(gpus)} GPUs are not. Symptom: these "
                "reach about half the rate. Bind ranks to the node of their GPU (numactl)."
            )
    if gpus and (groups := len([*Path("/sys/kernel/iommu_groups").glob("*")])):
        yield (
            f"The IOMMU is on ({groups} groups). Symptom with ACS: GPUs of a machine exchange data at a fraction of "
            "PCIe's rate, or hang. `sudo lspci -vvv | grep ACSCtl` must show no SrcValid+ at bridges."
        )
    for adapter in sorted(Path("/sys/class/infiniband").glob("*")):
        paths = (adapter / "ports/1/gid_attrs/types").glob("*")
        kinds = {path.name: kind for path in sorted(paths) if (kind := _word(path))}
        yield (
            f"{adapter.name} has the GIDs {kinds}. Symptom of a wrong one: NCCL fails in ibv_modify_qp, or times out. "
            "NCCL_IB_GID_INDEX chooses it; take one of RoCE v2."
        )


def _word(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None
