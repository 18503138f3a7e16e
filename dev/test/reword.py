"""Reverses the words of a trainer's messages, for test_prose.sh, which tests that no script relies on the words.

usage: reword.py SOURCE ...   rewords the C files in place; prints how many string literals have changed
       reword.py              rewords a text of a message from stdin to stdout

It changes string literals for people: arguments of printf, die, warn and similar functions, and help texts. It keeps
format specifiers, escapes, options, file names, words with digits or underscores, words of one letter, and "error: "
and "warning: ".
"""
import re
import sys

SPEAKERS = {"printf", "fprintf", "puts", "die", "die_with", "warn", "fail", "json_syntax_error", "arena_group"}
# Literals in these calls are changed only if they are sentences, in which two words follow each other.
WRITERS = {"format_checked", "snprintf", "GROUP", "INT", "REAL", "TEXT", "CHOICE", "FLAG", "X"}
KEPT = (r"\\.|%[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|ll|[hlzjt])?[a-zA-Z%]|"  # escapes and format specifiers
        r"--?[a-z][\w-]*|\w*[\d_]\w*|\w+(?:[/.]\w+)+|(?:error|warning): ")
PARTS = re.compile(r"(%s)|([A-Za-z]{2,})" % KEPT)
TOKENS = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\\n]|\\.)*'|\"((?:[^\"\\\n]|\\.)*)\"|(\w*)\s*(\()|(\))", re.S)


def reword(text):
    return PARTS.sub(lambda m: m.group(1) or m.group(2)[::-1], text)


def is_sentence(text):
    return re.search(r"[A-Za-z]{2,},? [A-Za-z]{2,}", text)


def reword_source(source):
    """Returns the source with reversed words, and the number of changed literals."""
    calls, changed = [], 0

    def token(m):
        nonlocal changed
        if m.group(3):
            calls.append(m.group(2))
        elif m.group(4) and calls:
            calls.pop()
        text = m.group(1)
        if not text or not (SPEAKERS & set(calls) or (WRITERS & set(calls) and is_sentence(text))):
            return m.group(0)
        new = reword(text)
        changed += new != text
        return '"' + new + '"'

    return TOKENS.sub(token, source), changed


def main(paths):
    total = 0
    for path in paths:
        with open(path, encoding="utf-8") as file:
            source, changed = reword_source(file.read())
        with open(path, "w", encoding="utf-8") as file:
            file.write(source)
        total += changed
    if paths:
        print(total)
    else:
        sys.stdout.write(reword(sys.stdin.read()))


if __name__ == "__main__":
    main(sys.argv[1:])
