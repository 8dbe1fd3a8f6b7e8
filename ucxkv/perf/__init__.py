"""`ucxkv perf`: ucxkv's calls beside UCX's own test, other libraries, a socket and a copy, on one or two machines.

In reading order: plan (what to measure), backends (who can), wires (over what), process (a backend's process), sides
(this machine and another one), product and foreign (rows), machine (facts), report, plot, run; server and link are the
two-node mode. `peers` is what runs in the processes of the backends, `active` the one of our own binding.
"""
