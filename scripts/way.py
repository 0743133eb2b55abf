"""How far a call goes: the files of `wassail` that run in one `radii` at l2, and the deepest stack.

    python scripts/way.py [--norm 2] [--method auto] [--list]

Only frames of certificates/ count: what a reader of a proof has to follow. The model was read
before, and every module is loaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import wassail as ws
from wassail.certificates.graph.reader import read

ROOM = str(Path(ws.__file__).parent / "certificates")


def main() -> None:
    """Print the number of files and frames."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--norm", default="2")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    model = ws.zoo.open_model("digits-cnn-adv").model
    x, y = ws.zoo.open_data("digits").read(0, 2)
    graph = read(model, tuple(x.shape[1:]))
    files: set[str] = set()
    deepest = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event != "call" or not frame.f_code.co_filename.startswith(ROOM):
            return
        files.add(frame.f_code.co_filename[len(ROOM) + 1 :])
        depth = 0
        above: FrameType | None = frame
        while above is not None:
            depth += above.f_code.co_filename.startswith(ROOM)
            above = above.f_back
        deepest = max(deepest, depth)

    ws.radii(graph, x, y, options.norm, method=options.method, effort=0.2)
    sys.setprofile(look)
    ws.radii(graph, x, y, options.norm, method=options.method, effort=0.2)
    sys.setprofile(None)
    print(f"{len(files)} files, {deepest} frames")
    if options.list:
        print("\n".join(sorted(files)))


if __name__ == "__main__":
    main()
