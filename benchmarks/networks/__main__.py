"""python -m benchmarks.networks fetch [NAME ...] [--from URL] | list"""

from __future__ import annotations

import argparse
import sys

from benchmarks.networks.fetch import address_of, fetch
from benchmarks.networks.files import FOLDER, NETWORKS, Missing, digest_of


def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks")
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="download, check, build and keep")
    get.add_argument("names", nargs="*", help="networks and data sets; default all")
    get.add_argument("--from", dest="mirror", default="", help="a server that has the built files")
    commands.add_parser("list", help="what there is, and whether it is here")
    options = parser.parse_args(words)
    if options.command == "list":
        show()
        return 0
    failed = 0
    for name in options.names or NETWORKS:
        try:
            fetch(name, mirror=options.mirror)
        except Missing as error:
            failed += 1
            print(error, file=sys.stderr)
    return 1 if failed else 0


def show() -> None:
    """One line for each network and data set."""
    for entry in NETWORKS.values():
        path = FOLDER / entry.file
        state = "missing"
        if path.exists():
            state = "here" if digest_of(path) == entry.sha256 else "here, with another SHA-256"
        first = address_of(entry.sources[0]) if entry.sources else "no public address"
        print(f"{entry.name}: {entry.kind}, {entry.licence}, {state}; {first}")


if __name__ == "__main__":
    sys.exit(main())
