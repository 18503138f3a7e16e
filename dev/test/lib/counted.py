"""Counts the checks of a Python test, calls programs, and finds the Python that has the libraries of the reports."""
import contextlib
import io
import os
import pathlib
import sys
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[3]
REPORT_PYTHON = ROOT / "build" / "report-venv" / "bin" / "python"
passed = failed = 0


def check(condition, *what):
    """Counts a check. If it fails, prints `what`."""
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print("FAILED:", *what)


def finish():
    """Prints "N passed, N failed" and ends the program: status 0 if no check failed."""
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


def call(main, *words):
    """Calls main() of a Python program, which takes longer to start. Returns (exit status, stdout, stderr)."""
    out, error = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    before, sys.argv = sys.argv, ["program", *map(str, words)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    sys.argv = before
    out.flush()
    text = out.buffer.getvalue().decode()
    return (1, text, error.getvalue() + status) if isinstance(status, str) else (status or 0, text, error.getvalue())


def go_on_with_report_libraries(missing, skipped):
    """Runs the test again with the Python of build/report-venv, after an ImportError. If that Python is missing, or the
    test runs with it already, prints that `skipped` is skipped and ends the program.
    """
    if REPORT_PYTHON.exists() and not os.environ.get("IN_REPORT_VENV"):
        os.execve(REPORT_PYTHON, [str(REPORT_PYTHON), *sys.argv], {**os.environ, "IN_REPORT_VENV": "1"})
    print(f"skipped: {skipped}: {missing} (scripts/setup_report.sh installs what it needs)")
    finish()
