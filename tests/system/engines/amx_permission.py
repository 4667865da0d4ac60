"""Asks the kernel for AMX in each Python process of the engines, where it is installed as ``sitecustomize``.

vLLM's attention on CPUs uses AMX where the processor has it, and does not ask: oneDNN does, with its first
product that is large enough. Without this an engine whose first prompt has three tokens ends by SIGILL.
"""

import ctypes
import platform

ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
TILE_DATA = 18

if platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA)  # an error: there is no AMX
