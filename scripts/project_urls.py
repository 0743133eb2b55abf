"""The addresses of the project and its README for packages: a hook of hatchling.

They are those of the repository that the packages are built from. GitHub's runners name it; built
anywhere else the packages carry no address, rather than one that may be wrong. A package index
knows no files of the repository, so the README's links and pictures get the same address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def addresses(server: str, repository: str) -> dict[str, str]:
    """The addresses of a repository; none without its name.

    Args:
        server: address of the host, for example of GitHub.
        repository: "owner/name", or nothing.
    """
    if not server or repository.count("/") != 1:
        return {}
    owner, name = repository.split("/")
    home = f"{server}/{repository}"
    return {
        "Homepage": home,
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def readme(text: str, server: str, repository: str) -> str:
    """The README with links and pictures that lead from a package index to the repository.

    Args:
        text: Markdown.
        server: address of the host.
        repository: "owner/name", or nothing; then the text stays as it is.
    """
    home = addresses(server, repository).get("Homepage")
    if home is None:
        return text

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        view = "raw" if mark else "blob"
        return f"{mark}[{label}]({home}/{view}/main/{target})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)", link, text)


class ProjectUrls(MetadataHookInterface):
    """`urls` and `readme` of `[project]`, which pyproject.toml leaves to this hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the addresses in.

        Args:
            metadata: the table `[project]`.
        """
        place = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
        metadata["urls"] = addresses(*place)
        text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, *place)}
