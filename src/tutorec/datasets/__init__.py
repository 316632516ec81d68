"""Data to train on: the shop with its planted truth, and files in Criteo's format."""
