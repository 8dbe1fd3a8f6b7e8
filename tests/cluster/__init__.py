"""Real nodes, etcd and clients under faults; what the clients saw is checked (scripts/cluster_faults.py)."""
