"""Tables in slower memory, and caches of their rows in faster memory.

::

    slower memory           faster memory          the tables
    a file on the disk      pages of the system    row_file.py: mapped, pages are read together
    a file on the disk      slots in memory        cached_tables.py
    the host's memory       slots on the GPU       managed_tables.py, fbgemm's kernels

``row_cache.py`` decides which rows have a slot; it knows numbers only.
"""
