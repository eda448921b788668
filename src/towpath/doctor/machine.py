"""Facts about one machine that need no other machine: its interfaces, versions, variables, and what cannot be tested."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from towpath.doctor.interfaces import Interface, gloo_choice, interfaces, nccl_choice, resolved
from towpath.version import __version__

_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|TP|UCX|OMP|MKL|CUDA|HIP)_\w+")
_PRIVATE = re.compile(r"TORCHELASTIC_\w+|TORCHINDUCTOR_\w+|TORCH_(HOME|EXTENSIONS_DIR)|\w*_(HOME|ROOT|PATH|FILE)")
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
_PCI, _INFINIBAND = Path("/sys/bus/pci/devices"), Path("/sys/class/infiniband")


def machine_facts(on_gpus: bool) -> dict[str, Any]:
    """Return what this machine says of itself, as JSON."""
    found = interfaces()
    gloo, nccl = gloo_choice(found), nccl_choice(found)
    return {
        "interfaces": found,
        "gloo": gloo,
        "nccl": nccl,
        "training": nccl if on_gpus else gloo,
        "on_gpus": on_gpus,
        "names": resolved(socket.gethostname()),
        "versions": _versions(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _PRIVATE.fullmatch(name)
        },
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "shapers": _shapers(),
        "notes": [*_adapters(found), *_infiniband()],
    }


def has_gpus() -> bool:
    """Return whether the kernel knows GPUs of NVIDIA, and the environment does not hide them. It needs no torch."""
    return Path("/proc/driver/nvidia/version").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") != ""


def _versions() -> dict[str, str]:
    found = {"towpath": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if driver := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text):
            found["driver"] = driver[0]
    return found


def _shapers() -> dict[str, float]:
    """Return the bytes per second to which a queue of this machine limits an interface, as far as `tc` tells."""
    if shutil.which("tc") is None:
        return {}
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(["tc", "-j", "qdisc", "show"], capture_output=True, text=True, timeout=5, check=False)
        rows = [row for row in json.loads(done.stdout or "[]") if isinstance(row.get("options"), dict)]
        return {row["dev"]: row["options"]["rate"] for row in rows if isinstance(row["options"].get("rate"), int)}
    return {}


# What cannot be tested from here, with the symptom that it is known for -----------------------------------------------


def _adapters(found: Sequence[Interface]) -> Iterator[str]:
    """Yield what NUMA nodes and the IOMMU may do to GPUs of this machine."""
    gpus = {path.name: _word(path / "numa_node") for path in _gpus()}
    if not gpus:
        return
    for interface in found:
        node = _word(Path("/sys/class/net", interface["name"], "device", "numa_node"))
        if far := [name for name, its in gpus.items() if node not in (None, "-1", its)]:
            yield (
                f"{interface['name']} is on NUMA node {node}, and {len(far)} of {len(gpus)} GPUs are not. "
                "Symptom: these reach about half the rate. Bind ranks to the node of their GPU (numactl)."
            )
    if groups := len(_listed(Path("/sys/kernel/iommu_groups"))):
        yield (
            f"The IOMMU is on ({groups} groups). Symptom with ACS: GPUs of a machine exchange data at a fraction of "
            "PCIe's rate, or hang. `sudo lspci -vvv | grep ACSCtl` must show no SrcValid+ at bridges."
        )


def _gpus() -> Iterator[Path]:
    for path in _listed(_PCI):
        if _word(path / "vendor") == _NVIDIA and (_word(path / "class") or "").startswith(_DISPLAYS):
            yield path


def _infiniband() -> Iterator[str]:
    """Yield the kinds of addresses (GIDs) of adapters for RDMA."""
    for adapter in _listed(_INFINIBAND):
        types = adapter / "ports" / "1" / "gid_attrs" / "types"
        kinds = {entry.name: word for entry in _listed(types) if (word := _word(entry)) is not None}
        if kinds:
            first = next((index for index, kind in sorted(kinds.items()) if "v2" in kind), None)
            yield (
                f"{adapter.name} has {len(kinds)} GIDs; the first for RoCE v2 is {first}. Symptom of a wrong one: NCCL "
                f"fails in ibv_modify_qp, or times out. NCCL_IB_GID_INDEX={first or 0} chooses it."
            )


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _word(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None
