#!/usr/bin/env python3
"""Makes real text that does not repeat, from the Linux sources that Debian and Ubuntu ship: C and prose, no hub needed.

    data/linux_source.py                            data/linux_train.txt (90 MB) and data/linux_val.txt (3 MB)
    data/prepare.py data/linux_train.txt --val data/linux_val.txt --tokenizer bytes --name linux

Downloads the package by apt-get (140 MB; nothing is installed), and takes its ASCII .c and .rst files of 1,500 to
120,000 bytes, each once, in an order that is always the same, with a line <|endoftext|> between them. Debian 12's
package has 330 MB of them.
"""
import argparse
import glob
import hashlib
import random
import subprocess
import sys
import tarfile
import tempfile

SMALLEST, LARGEST = 1500, 120_000  # bytes of a document
VALIDATION = 3_000_000             # bytes of the validation text
MARK = b"\n<|endoftext|>\n"


def run(*command, **options):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout
    except FileNotFoundError:
        sys.exit(f"error: there is no {command[0]}; this needs Debian or Ubuntu")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(command)}: {error.stderr.strip()}")


def documents(archive):
    found, seen = [], set()
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            if member.isfile() and SMALLEST <= member.size <= LARGEST and member.name.endswith((".c", ".rst")):
                text = tar.extractfile(member).read()
                key = hashlib.sha256(text[:4000]).digest()  # files that begin alike are versions of one file
                if text.isascii() and b"\0" not in text and MARK.strip() not in text and key not in seen:
                    seen.add(key)
                    found.append(text.strip())
    random.Random(5).shuffle(found)
    return found


def write(path, texts, limit):
    """Writes texts from the end of the list, which it shortens, until `limit` bytes are reached. Returns the bytes."""
    size, count = 0, 0
    with open(path, "wb") as file:
        while texts and size < limit:
            text = texts.pop()
            file.write((MARK if count else b"") + text)
            size, count = size + len(text), count + 1
    print(f"{path}: {count} documents, {size} bytes")
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="linux-source-6.1", help="linux-source-VERSION (%(default)s)")
    parser.add_argument("--megabytes", type=float, default=90, help="training text (%(default)s)")
    parser.add_argument("--out", default="data", help="folder (%(default)s)")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run("apt-get", "download", o.package, cwd=folder)
        package = glob.glob(f"{folder}/*.deb")[0]
        run("dpkg", "-x", package, f"{folder}/x")
        print(run("dpkg-deb", "-f", package, "Package", "Version").strip().replace("\n", ", "))
        archives = glob.glob(f"{folder}/x/usr/src/**/linux-source-*.tar.*", recursive=True)
        if not archives:
            sys.exit(f"error: {o.package} holds no archive of sources")
        texts = documents(archives[0])
    write(f"{o.out}/linux_val.txt", texts, VALIDATION)
    wanted = o.megabytes * 1e6
    if (got := write(f"{o.out}/linux_train.txt", texts, wanted)) < wanted:
        sys.exit(f"error: {o.package} has {got} bytes, and --megabytes {o.megabytes:g} asks for more")


if __name__ == "__main__":
    main()
