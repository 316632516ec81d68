"""Modules that run in one process: embedding tables, their collections, and the dense layers around them."""
