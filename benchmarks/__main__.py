"""``python -m benchmarks NAME``, from the repository's root."""

from benchmarks.runner import main

if __name__ == "__main__":
    raise SystemExit(main())
