"""Find the folder of real networks: $WASSAIL_ZOO, else ../shared/zoo beside the project."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ZOO = Path(os.environ.get("WASSAIL_ZOO", ROOT.parent / "shared" / "zoo"))
if not (ZOO / "zoo.py").exists():
    sys.exit(f"no networks at {ZOO}: set WASSAIL_ZOO to the folder that holds zoo.py.")
sys.path.insert(0, str(ZOO))
from zoo import images, load  # noqa: E402

__all__ = ["ROOT", "ZOO", "images", "load"]
