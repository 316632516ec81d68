"""Sharding types, one small file each; the docstring of the file is the figure of what travels where."""
