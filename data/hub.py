"""Downloads TinyStories from the Hugging Face hub, or from the server $HF_ENDPOINT, and goes on where it broke off."""

import http.client
import math
import os
import re
import ssl
import time
import urllib.error
import urllib.request

from problems import BadInput
from progress import Progress

HUB_FOLDER = "datasets/roneneldan/TinyStories/resolve/main"
HUB_TRAIN, HUB_VAL = "TinyStories-train.txt", "TinyStories-valid.txt"
READ_BYTES = 1 << 20
# Gives up after so many attempts in a row without a new byte (the very first counts too); at once if there is no byte.
DOWNLOAD_TRIES = 5


def request_from(url, offset):
    """Requests a file from `offset` on. Returns (response or None if nothing is left, its offset, file size)."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-", "User-Agent": "data/prepare.py"})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as e:
        total = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", ""))
        if e.code == 416 and total and int(total[1]) == offset:
            return None, offset, offset
        raise
    if response.status == 200:  # the server does not support ranges: it sends the file from its start
        return response, 0, int(response.headers["Content-Length"])
    got = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if not got or int(got[1]) != offset:
        raise BadInput(f"{url}: the server answered with the wrong range, {response.headers.get('Content-Range')}")
    return response, offset, int(got[2])


def download_some(url, part, fraction, progress):
    """Appends to `part` over one connection until it holds `fraction` of the file, or the connection ends.

    Starts from the first byte if the server does not support ranges.

    Returns (bytes held, bytes wanted, file size).
    """
    have = os.path.getsize(part) if os.path.exists(part) else 0
    response, have, total = request_from(url, have)
    wanted = math.ceil(total * fraction)
    with open(part, "r+b" if have else "wb") as f:
        f.seek(have)
        f.truncate()
        while response and have < wanted:
            data = response.read(min(READ_BYTES, wanted - have))
            if not data:
                break
            f.write(data)
            have += len(data)
            progress.show(have, wanted)
    return have, wanted, total


def download(name, folder, fraction):
    """Downloads the first `fraction` of a hub file into `folder`, except bytes that an earlier download left there.

    Returns (path, bytes to read, bytes of the whole text).
    """
    server = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    path, url = os.path.join(folder, name), f"{server}/{HUB_FOLDER}/{name}"
    if os.path.exists(path):
        return path, math.ceil(os.path.getsize(path) * fraction), os.path.getsize(path)
    part, progress, failures, last = path + ".part", Progress(f"download {name}"), 0, -1
    while True:
        problem = "the connection ended early"
        try:
            have, wanted, total = download_some(url, part, fraction, progress)
            if have >= wanted:
                break
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as e:
            is_status = isinstance(e, urllib.error.HTTPError)
            problem = f"{e.code} {e.reason}" if is_status else getattr(e, "reason", None) or e
            have = os.path.getsize(part) if os.path.exists(part) else 0
        failures = 0 if have > last and last >= 0 else failures + 1
        last = have
        if failures >= DOWNLOAD_TRIES or have == 0:
            kept = f" {have} bytes are kept in {part}; run the same command again to download the rest." if have else ""
            remedy = "Without a network: text files of your own, or build/synth_stories"
            raise BadInput(f"cannot download {url}: {problem}.{kept} {remedy}")
        time.sleep(0.5 * failures)
    progress.done(have, wanted)
    if have < total:
        return part, wanted, total
    os.replace(part, path)
    return path, total, total
