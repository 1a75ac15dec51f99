"""Kinds of command-line options that several commands share; a bad value is refused before any work."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from msa_triton.benchmark.step import Shape


def whole(least: int):
    """The kind of an option that is a whole number of at least `least`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        return number

    return convert


count = whole(1)


def seconds(text: str) -> float:
    """The kind of an option that is a time in seconds, above 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and above 0 seconds, got {text}")
    return number


def new_file(text: str) -> Path:
    """The kind of an option that names a file to write: its folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    return path


def add_common(parser: argparse.ArgumentParser) -> None:
    """--seed and --json."""
    parser.add_argument("--seed", type=whole(0), default=0, help="of the random inputs")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write the results to this file as well")


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=count, help="threads of PyTorch; default: as PyTorch chooses")


def use_threads(threads: int | None) -> int:
    """Sets the threads of PyTorch if a number is given; returns how many there are."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def checked(parser: argparse.ArgumentParser, **sizes) -> Shape:
    """A `Shape`, or the parser's error message if its numbers do not go together."""
    try:
        return Shape(**sizes)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
