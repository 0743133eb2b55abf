"""What is published agrees with itself: versions, Pythons, requirements, workflows."""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.files import ROOT, script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KINDS = ("Added", "Changed", "Removed", "Fixed", "Advisories")
CONDA = (ROOT / "conda" / "meta.yaml").read_text()


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def test_one_version_everywhere() -> None:
    """Between releases the package is the next one's `.dev0`, and what cites it the last one."""
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert re.search(r'set version = "(.*)"', CONDA)[1] == version
    changes = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", changes, re.M)
    dated = [title for title in titles if title != "Unreleased"]
    found = re.fullmatch(r"(\S+) \((\d{4}-\d\d-\d\d)\)", dated[0])
    assert found is not None, dated[0]
    assert citation["version"] == found[1]
    assert date.fromisoformat(found[2]) == citation["date-released"]
    if version.endswith(".dev0"):
        released, coming = (
            tuple(map(int, text.split("."))) for text in (found[1], version.removesuffix(".dev0"))
        )
        assert titles[0] == "Unreleased" and coming > released
    else:
        assert version == found[1]


def test_changes_are_told_by_their_kind() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = changes.split("\n## ")[1]
    kinds = re.findall(r"^### (.*)$", newest, re.M)
    assert kinds and len(set(kinds)) == len(kinds) and set(kinds) <= set(KINDS)


def test_the_pythons_of_the_classifiers_are_those_that_are_tested() -> None:
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = workflow("tests")["jobs"]["tests"]["strategy"]["matrix"]
    assert said == matrix["python"]
    assert PROJECT["requires-python"] == f">={said[0]}"


def test_the_oldest_torch_is_tested_and_the_newest() -> None:
    (wanted,) = [text for text in PROJECT["dependencies"] if text.startswith("torch")]
    matrix = workflow("tests")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["torch"] == [wanted.replace(">=", "==") + ".0", "torch"]


def test_conda_needs_what_the_package_needs() -> None:
    run = CONDA.split("  run:\n")[1].split("  run_constrained:\n")[0]
    listed = {line.strip("- ").replace(" ", "") for line in run.splitlines()}
    wanted = {text.replace("torch", "pytorch") for text in PROJECT["dependencies"]}
    assert listed == wanted | {f"python{PROJECT['requires-python']}"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path: Any) -> None:
    """Targets of make, scripts and folders that a workflow names exist; it may write nothing."""
    text = path.read_text()
    made = yaml.safe_load(text)
    assert made["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in made["jobs"].values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
    for target in re.findall(r"make (?:LOCKED=1 )?([\w-]+)", text):
        assert target in targets, target
    for file in re.findall(r"(?:scripts|tests)/[\w./]+", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_no_text_of_others(path: Any) -> None:
    """Actions are named by the hash of a commit, and no command is put together from a name."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), step
            assert "${{" not in step.get("run", ""), step


def test_pinned_jobs_take_packages_by_their_hashes() -> None:
    """What `make` installs in a workflow is pinned, so its packages are checked by hash."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                words = step.get("run", "").split()
                if words[:1] == ["make"] and words[-1] != "wheel-test":
                    assert words[1] == "LOCKED=1", step


def test_the_lock_knows_every_pin() -> None:
    lock = script("lock")
    text = (ROOT / "requirements-lock.txt").read_text()
    locked = dict(re.findall(r"^(\S+)==(\S+) \\\n", text, re.M))
    assert locked == lock.pinned()
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert list(lock.PYTHONS) == said


def test_only_the_publishing_job_can_publish() -> None:
    jobs = workflow("release")["jobs"]
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert not any("password" in str(step) or "secrets" in str(step) for step in jobs.values())


def test_hooks_and_forms_are_read() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    names = [hook["id"] for hook in hooks]
    assert names == ["environment", "ruff-check", "ruff-format", "notebooks", "mypy"]
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert hooks[0]["entry"].split()[-1] in targets  # it makes the tools that the others run
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks[1:])
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.stem == "config" or {"name", "description", "body"} <= set(form)


def test_addresses_are_those_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "hatchling.metadata.plugin.interface"  # there only while packages are built
    stub = ModuleType(place)
    stub.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, place, stub)
    hook = script("project_urls")
    assert hook.addresses("", "") == {}
    assert hook.addresses("https://host", "nobody") == {}
    found = hook.addresses("https://host", "Owner/wassail")
    assert found["Homepage"] == "https://host/Owner/wassail"
    assert found["Documentation"] == "https://owner.github.io/wassail/"
    assert found["Issues"] == "https://host/Owner/wassail/issues"
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://host")
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/wassail")
    metadata: dict[str, Any] = {}
    hook.ProjectUrls().update(metadata)
    assert metadata["urls"] == found
    text = metadata["readme"]["text"]
    assert "(https://host/Owner/wassail/blob/main/docs/theory.md)" in text
    assert "(https://host/Owner/wassail/raw/main/docs/site/curve.png)" in text
    assert not re.search(r"\]\((?!https:)", text)
    plain = (ROOT / "README.md").read_text()
    assert hook.readme(plain, "", "") == plain


def test_every_extra_is_told() -> None:
    """Extras for users stand in some page, with their name in brackets."""
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for extra in set(PROJECT["optional-dependencies"]) - {"dev", "docs", "train"}:
        assert f"wassail[{extra}]" in text, extra
