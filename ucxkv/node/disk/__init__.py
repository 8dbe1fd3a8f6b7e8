"""A node's disk tier: blocks of class cache, written beside serving and brought back when somebody wants them.

places.py     which handle of the directory is which copy in the datafiles
coding.py     encodes what is written and decodes what is read, in threads
demoting.py   writes new blocks, in the order in which they came
fetching.py   reads copies into memory, decoded
promoting.py  brings blocks back into memory
tier.py       `DiskTier`: both, with the datafiles and their engines; what a node starts, asks and closes
"""
