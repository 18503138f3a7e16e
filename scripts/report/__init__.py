"""The parts of scripts/report.py: reading logs, pairing runs, figures, words and the page."""
