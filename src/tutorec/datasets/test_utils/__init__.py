"""Data in Criteo's format for tests."""
