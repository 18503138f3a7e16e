"""The two ways in which data/prepare.py ends early, and how it imports packages that a machine may lack."""

import importlib
import importlib.util
import sys


class BadInput(Exception):
    """The input or an option is wrong: nothing of the run is kept."""


class Interrupted(Exception):
    """Something outside the input stopped the run: the same command goes on with it."""


def package_folder(package, what):
    spec = importlib.util.find_spec(package)
    if not spec or not spec.submodule_search_locations:
        raise BadInput(
            f"{what} needs the Python package {package.replace('_', '-')}, which {sys.executable} does not have. "
            "Run data/setup_venv.sh, then data/.venv/bin/python data/prepare.py ... (--tokenizer bytes with .txt, "
            ".jsonl and .gz files needs no package)"
        )
    return spec.submodule_search_locations[0]


def import_package(package, what):
    package_folder(package, what)
    return importlib.import_module(package)
