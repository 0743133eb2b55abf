"""The networks and data of the tables: where they come from, and how they are built.

`networks.json` has for each its public source, licence, architecture, scaling and SHA-256.
`python -m benchmarks.networks fetch` downloads, checks and builds them into one folder:
$WASSAIL_ZOO if it is set, else `shared/zoo` beside the project if it is there, else
`.cache/networks`.
"""

from benchmarks.networks.files import FOLDER, NETWORKS, Entry, checksum, digest_of
from benchmarks.networks.load import images, layers, load

__all__ = ["FOLDER", "NETWORKS", "Entry", "checksum", "digest_of", "images", "layers", "load"]
