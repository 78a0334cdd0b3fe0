"""How busy a machine is with programs that are none of a measurement's: its foreign load.

Reads /proc; where there is none (not Linux) the load is 0. A figure is in cores. Short windows give
rough figures: the kernel counts in hundredths of a second.
"""

from __future__ import annotations

import os
from pathlib import Path

VOID_ABOVE = 0.3  # cores; times taken beside more than that do not count


def busy_s() -> float:
    """CPU seconds that all programs, and other guests of the host, have used since boot.

    Interrupts are left out: those of a slow network belong to the measurement.
    """
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, stolen = (int(fields[i]) for i in (0, 1, 2, 7))
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process."""
    return sum(os.times()[:2])


def machine_id() -> str:
    """Equal for processes of one machine, whatever their network namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
