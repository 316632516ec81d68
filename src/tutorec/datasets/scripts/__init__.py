"""Programs that prepare Criteo's files: `python -m tutorec.datasets.scripts.NAME`."""
