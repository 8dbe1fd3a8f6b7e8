"""A node's disk tier: blocks of class cache, written beside serving and brought back when somebody wants them.

places.py     which handle of the directory is which copy in the datafiles
demoting.py   writes new blocks, in the order in which they came
promoting.py  brings blocks back into memory
tier.py       `DiskTier`: both, with the datafiles and their engines; what a node starts, asks and closes
"""
