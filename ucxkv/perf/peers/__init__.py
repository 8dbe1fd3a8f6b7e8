"""What runs in the processes of `ucxkv perf`'s backends: a server and a client of each, and the loops that measure.

Another interpreter than ucxkv's may run it (`--python ucxx=/path/to/python`), since ucxx and NIXL bring a libucx of
their own. So this package imports the standard library, numpy and one backend's library each, itself by relative
imports only, and keeps to Python 3.10.

In reading order: blocks (memory and its content), base (what a backend is), rounds (how one operation is measured),
messages (active and tagged messages), worker (the process); sockets, perftest, rapids, nixl: the backends.
"""
