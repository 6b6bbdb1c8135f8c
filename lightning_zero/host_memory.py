"""What the host has room for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_host_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int | None:
    """Bytes that can be allocated without swapping; ``None`` where the system does not tell."""
    known = [value for value in (_available(Path("/proc/meminfo")), _left_of_limit(_CGROUP)) if value is not None]
    return min(known, default=None)


def _available(meminfo: Path) -> int | None:
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_of_limit(cgroup: Path) -> int | None:
    """What a container's limit leaves: file pages count as used there, and make room when it is needed."""
    limit, used, stat = (cgroup / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not (limit.exists() and used.exists() and stat.exists()) or limit.read_text().strip() == "max":
        return None
    entries = dict(line.split() for line in stat.read_text().splitlines())
    reclaimable = int(entries.get("inactive_file", 0)) + int(entries.get("active_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + reclaimable
