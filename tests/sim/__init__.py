"""Deterministic simulation: virtual time, processes, network, disk, and a linearizability checker."""
