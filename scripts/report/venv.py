"""Finds the Python that has the libraries of the reports."""
import os
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "build" / "report-venv" / "bin" / "python"
LIBRARIES = ("jinja2", "matplotlib", "scipy")  # of scripts/report.py


def need(hint, *libraries):
    """Imports libraries and returns the last. If one is missing, runs the program again with build/report-venv; if
    there is none, or it is missing there too, ends with the hint."""
    try:
        return [__import__(name) for name in libraries][-1]
    except ImportError as missing:
        if PYTHON.exists() and not os.environ.get("IN_REPORT_VENV"):
            os.execve(PYTHON, [str(PYTHON), *sys.argv], {**os.environ, "IN_REPORT_VENV": "1"})
        sys.exit(f"error: {missing}; {hint}")
