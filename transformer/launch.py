"""How a process that trains on the CPU wants its memory: in huge pages, and kept.

Every update allocates and frees the same large arrays. By default the C library takes each from the
system and gives it back, page by page; with these settings small models train 1.2 to 1.4 times as
fast. They must stand before the process starts, so the program starts itself once more.
"""

import os
import platform
import sys
from pathlib import Path

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),  # take nothing from the system one by one
    "MALLOC_TRIM_THRESHOLD_": str(2**34),  # give nothing back
    "MALLOC_TOP_PAD_": str(2**28),  # take this much at once
}
_ACCELERATORS = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd")


def on_huge_pages() -> None:
    """Starts the running script anew with these settings, unless it has them, the user has chosen
    settings of their own, there is an accelerator, or the C library is another one."""
    chosen = {"GLIBC_TUNABLES", *_KEEP} & set(os.environ)
    if chosen or not _helps() or sys.flags.interactive:
        return
    settings = os.environ | _KEEP | {"GLIBC_TUNABLES": _HUGE_PAGES}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], settings)


def _helps() -> bool:
    accelerated = any(list(Path("/dev").glob(pattern)) for pattern in _ACCELERATORS)
    return platform.libc_ver()[0] == "glibc" and not accelerated
