"""The addresses of the project for its packages: a hook of hatchling.

They are those of the repository that the packages are built from. GitHub's runners name it; built
anywhere else the packages carry no address, rather than one that may be wrong.
"""

from __future__ import annotations

import os
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


class ProjectUrls(MetadataHookInterface):
    """`[project.urls]`, which pyproject.toml leaves to this hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the addresses in.

        Args:
            metadata: the table `[project]`.
        """
        server = os.environ.get("GITHUB_SERVER_URL", "")
        metadata["urls"] = addresses(server, os.environ.get("GITHUB_REPOSITORY", ""))
