"""Finds the Python that has the libraries of the reports."""
import os
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "build" / "report-venv" / "bin" / "python"


def go_on_there(missing, hint):
    """After an ImportError: runs the program again with build/report-venv. If there is none, or the library is missing
    there too, ends with the hint."""
    if PYTHON.exists() and not os.environ.get("IN_REPORT_VENV"):
        os.execve(PYTHON, [str(PYTHON), *sys.argv], {**os.environ, "IN_REPORT_VENV": "1"})
    sys.exit(f"error: {missing}; {hint}")
