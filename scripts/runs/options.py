"""Command lines and messages of the programs that start runs."""
import argparse
import errno
import os
import re
import sys

NO_CHECKPOINTS = ("checkpoint-dir", "resume", "export-hf")
TRAINS_NOTHING = ("dry-run", "help", "json", "list", "world-size")


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def say(text):
    """Prints a line at once. If the reader of the output has gone, the program goes on without it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end(main):
    """Runs main(words of the command line) and ends the program with its status, or with one line if a file cannot be
    written."""
    sys.stdout.reconfigure(errors="backslashreplace")  # the locale may lack characters
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        fail(f"{error.filename or 'a file'}: {why}; mend this and start again: finished runs are kept")


class Value(argparse.Action):
    """Stores the value of an option. Dies if there is none, or only separators of a list."""
    def __call__(self, parser, namespace, value, option=None):
        if not re.search(r"[^,\s]", value or ""):
            fail(f"{option} needs a value")
        setattr(namespace, self.dest, value)


def parse(words, usage, defaults, flags, takes_words=False):
    """Returns (options, words that are no options, the trainer's options, which follow "--").

    `defaults` are the options that take a value, `flags` those that take none. With --help prints the usage and exits.
    Dies if an option is not known or lacks its value, or if there are words that are no options but `takes_words` is
    False. A program takes trainer options if its usage has "[-- ".
    """
    has_trainer = "[-- " in usage
    end = words.index("--") if has_trainer and "--" in words else len(words)
    words, extra = words[:end], words[end + 1:]
    if "--help" in words:
        say(usage.rstrip("\n"))
        sys.exit(0)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in defaults.items():
        parser.add_argument("--" + name, action=Value, nargs="?", default=default)
    for name in flags:
        parser.add_argument("--" + name, action="store_true")
    parser.error = lambda message: fail(message.removeprefix("argument "))
    options, others = parser.parse_known_args(words)
    for word in others:
        if word.startswith("-") or not takes_words:
            fail(f"unknown option {word}; --help lists all options" +
                 "; put options of the trainer after --" * has_trainer)
    return options, others, extra


def split(text):
    """The words of a list, without repetitions."""
    return list(dict.fromkeys(text.replace(",", " ").split()))


def in_a_name(recipe):
    """A recipe as a part of a file's name."""
    return re.sub("[:+=/]", "-", recipe)


def number(option, text, kind=int, low=1, below="1e15"):
    """Returns the option's number. Dies if the text is not a number from `low` on and below `below`."""
    try:
        value = kind(text) if re.fullmatch(r"[-+.\w]+", text, re.ASCII) and "_" not in text else None
    except ValueError:
        value = None
    if value is None or not low <= value < float(below):
        fail(f"{option}: \"{text}\" is not a {'whole ' if kind is int else ''}number from {low} on and below {below}")
    return value


def check_extra(extra, set_here, by):
    """Dies if an option for the trainer is one of `set_here`, or one that makes no sense in a sweep or verdict `by`."""
    for word in extra:
        name = word[2:].split("=")[0] if word.startswith("--") else ""
        if name in set_here:
            fail(f"--{name} is set by the {by}; see --help")
        if name in NO_CHECKPOINTS:
            fail(f"--{name} makes no sense here: runs of a {by} keep no checkpoints; leave it out")
        if name in TRAINS_NOTHING:
            fail(f"--{name} trains nothing; --dry-run before the -- prints every run's command")
        if name in ("fast", "msamp"):
            fail(f"--{name} sets --precision, also of BF16 runs; give fp8:fast, or the other options that it sets")
