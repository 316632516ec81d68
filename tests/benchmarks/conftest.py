"""The benchmarks are found where `python -m benchmarks` finds them: in the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
