"""Clients' packages are in requirements-clients.txt: what needs one that is missing is skipped."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "clients"))
