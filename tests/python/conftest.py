"""Shared by the Python tests: zensync must be importable, from an installation or from
PYTHONPATH."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
