"""A line on stderr that says how far a long work is, and the time left."""

import sys
import time


def duration(seconds):
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Progress:
    """A line on stderr. A terminal shows one line that is rewritten. Elsewhere a new line comes at most every ten
    seconds, and one at the end."""

    def __init__(self, title):
        self.title, self.start, self.shown, self.first = title, time.monotonic(), time.monotonic(), None
        self.terminal = sys.stderr.isatty()

    def line(self, done, total, extra):
        if self.first is None:
            self.first = done
        seconds = max(time.monotonic() - self.start, 1e-9)
        rate = (done - self.first) / seconds
        left = f" | {duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        share = f"{100 * done / max(total, 1):5.1f}% | {done / 1e6:.1f} of {total / 1e6:.1f} MB"
        return f"{self.title}: {share} | {rate / 1e6:.1f} MB/s{extra}{left}"

    def show(self, done, total, extra=""):
        line, now = self.line(done, total, extra), time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        print(
            f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def done(self, done, total, extra=""):
        print(("\r\x1b[K" if self.terminal else "") + self.line(done, total, extra), file=sys.stderr, flush=True)
