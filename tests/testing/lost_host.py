"""Connections to a host that is lost: no packet comes back, and nothing closes them."""

import ctypes
import socket

SO_ATTACH_FILTER = 26
RETURN = 0x06


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def drop_packets_to(each: socket.socket) -> None:
    """Let the kernel drop all packets for a socket, before it acknowledges them; those for a listener are
    the beginnings of connections.
    """
    keep_nothing = (_Instruction * 1)(_Instruction(code=RETURN, k=0))
    each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(_Program(1, keep_nothing)))
