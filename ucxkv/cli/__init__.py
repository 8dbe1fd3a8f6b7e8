"""The command `ucxkv`. Importing it loads no command: each imports what it needs when it runs.

Exit codes, the same for all commands: 0 done; 1 the answer is no (a miss, a failed check, a block refused);
2 the call or the set-up is wrong; 3 no node could answer; 130 Ctrl-C. Errors are one line on stderr, never a traceback.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from ucxkv.cli.app import run

        code = run()
    except KeyboardInterrupt:  # while modules load; a command that runs ends with 130 by itself
        code = 130
    raise SystemExit(code)
