"""``python -m benchmarks.instructions.syscalls FD COMMAND …``: counts a process's system calls by ptrace.

At each call of getsid, by which the counted process marks where a count ends, it writes a JSON line to the
descriptor FD: the calls since the last mark without those of futex, which threads make as they happen to
meet, and how many of them waited for events, which are turns of the event loop.
"""

import ctypes
import json
import os
import platform
import signal
import sys
from typing import NamedTuple


class Numbers(NamedTuple):
    """The numbers of the system calls that matter."""

    futex: int
    getsid: int
    waits: frozenset[int]


NUMBERS = {
    "x86_64": Numbers(202, 124, frozenset({232, 281, 441})),
    "aarch64": Numbers(98, 156, frozenset({22, 441})),
}
_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_OPTIONS = (
    0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100000
)  # good syscall stops; fork, vfork, clone, exec; end with us
_ENTRY = 1


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 8),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int, data: object) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace {request:#x}: {os.strerror(error)}")


def trace(out: int, command: list[str]) -> int:
    """Run ``command`` and count; return its exit code. Raises OSError where ptrace is not allowed."""
    numbers = NUMBERS[platform.machine()]
    child = os.fork()
    if not child:
        _ptrace(_TRACEME, 0, 0, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.execvp(command[0], command)
    os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, 0, _OPTIONS)
    _ptrace(_SYSCALL, child, 0, None)
    info = _SyscallInfo()
    size = ctypes.sizeof(info)
    n_calls = n_waits = 0
    while True:
        pid, status = os.waitpid(-1, 0x40000000)  # __WALL: threads too
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if pid == child:
                return os.waitstatus_to_exitcode(status)
            continue
        stopped_by = os.WSTOPSIG(status)
        passed_on = 0
        if stopped_by == _SYSCALL_STOP:
            _ptrace(_GET_SYSCALL_INFO, pid, size, ctypes.byref(info))
            if info.op != _ENTRY or info.number == numbers.futex:
                pass
            elif info.number == numbers.getsid:
                os.write(out, json.dumps({"syscalls": n_calls, "turns": n_waits}).encode() + b"\n")
                n_calls = n_waits = 0
            else:
                n_calls += 1
                n_waits += info.number in numbers.waits
        elif stopped_by not in {signal.SIGTRAP, signal.SIGSTOP}:
            passed_on = stopped_by
        _ptrace(_SYSCALL, pid, 0, passed_on)


if __name__ == "__main__":
    sys.exit(trace(int(sys.argv[1]), sys.argv[2:]))
