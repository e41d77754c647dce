"""Where a run took place: code, versions and hardware, for run.json and evaluation.json."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eppo.config import ROOT

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "vllm", "numpy", "pandas")


def environment() -> dict[str, Any]:
    """What run.json says about code and machine: commit, dirty (tracked files changed), versions, hardware; None if unknown."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    hardware = {"system": platform.system(), "machine": platform.machine(), "processor": _processor(), "gpus": gpus,
                "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
                "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)}
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes), "versions": versions,
            "hardware": hardware}


def _git(*arguments: str) -> str | None:
    """The output of a git command in the repository of this file, None where there is none."""
    if not (ROOT / ".git").exists():
        return None
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str | None:
    path = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")] \
        if path.exists() else []
    return names[0] if names else platform.processor() or None
