"""Run a command that may not use io_uring, as in a container under Docker's default seccomp profile.

usage: python scripts/without_io_uring.py [--errno EPERM] -- COMMAND [ARGUMENT...]

The three system calls of io_uring fail with the errno in the command and everything that it starts; all others work.
For example the whole test suite: `python scripts/without_io_uring.py -- bash scripts/test.sh --quick`. Needs no
privileges; Linux with CONFIG_SECCOMP_FILTER. Exit code 127: the filter or the command could not be set up.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
RET_ERRNO, RET_ALLOW = 0x0005_0000, 0x7FFF_0000
LOAD_WORD, JUMP_IF_GE, JUMP_IF_GT, RETURN = 0x20, 0x35, 0x25, 0x06
IO_URING_SETUP, IO_URING_REGISTER = 425, 427
"""The first and the last of the three; the numbers are the same on every architecture."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_io_uring(code: int = errno.EPERM) -> None:
    """Make io_uring fail with errno `code` in this process from now on, for good. Raises OSError."""
    instructions = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (LOAD_WORD, 0, 0, 0),  # the number of the system call
            (JUMP_IF_GE, 0, 2, IO_URING_SETUP),
            (JUMP_IF_GT, 1, 0, IO_URING_REGISTER),
            (RETURN, 0, 0, RET_ERRNO | code),
            (RETURN, 0, 0, RET_ALLOW),
        )
    )
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, first, second in (
        (PR_SET_NO_NEW_PRIVS, 1, None),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(option, ctypes.c_ulong(first), second or ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
            code = ctypes.get_errno()
            raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errno", default="EPERM", help="what the calls fail with (default EPERM)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    code = getattr(errno, arguments.errno, None)
    if not command or not isinstance(code, int):
        parser.error("a command is needed" if not command else f"{arguments.errno} is no errno's name")
    try:
        refuse_io_uring(code)
        os.execvp(command[0], command)
    except OSError as exc:
        print(f"{sys.argv[0]}: {command[0]}: {exc}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
