"""Seals: a digest of everything that a run claims, and who vouches for it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wassail as ws
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.evaluation.sealing import check_seal, claim_of, fingerprint_of, seal
from wassail.report.board import write_board
from wassail.report.standing import CLAIM, SEALED, VERIFIED, standing

WORDS = "evaluate digits-mlp -n 6 --eps 0.05 --order inf --attacks fgsm --no-look --quiet"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    assert main([*WORDS.split(), "--certify", "crown", "--out", str(out)]) == 0
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """A private and a public key in two files."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    secret = folder / f"{name}.pem"
    secret.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    public = folder / f"{name}.pub"
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    )
    return secret, public


def test_a_seal_covers_all_that_a_claim_rests_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["seal", str(run)]) == 0
    assert "it has no signature" in capsys.readouterr().out
    first = check_seal(run)
    assert first and first.signer is None and check_seal(run) == first
    claim = claim_of(run)
    assert {"config.json", "results/summary.json", "results/manifest.json"} <= set(claim["files"])
    assert claim["versions"]["wassail"] and claim["model"]["weights"] and claim["data"]["files"]
    # pages and times are no part of it
    (run / "report.html").write_text("another page")
    assert check_seal(run)
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text + " ")
    found = check_seal(run)
    assert not found and "config.json" in str(found)
    (run / "config.json").write_text(text)
    content = json.loads((run / "seal.json").read_text())
    changes: list[dict[str, Any]] = [
        {"digest": "0" * 64},
        {"claim": {**content["claim"], "versions": {}}},
        {"claim": []},
    ]
    for change in changes:
        (run / "seal.json").write_text(json.dumps(content | change))
        assert not check_seal(run)
    for text in ("", "[]", "{}", '{"claim": NaN, "digest": 1, "signature": null}', "[" * 9999):
        (run / "seal.json").write_text(text)
        with pytest.raises(InputError, match="is no seal"):
            check_seal(run)
    (run / "seal.json").unlink()
    (run / "seal.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="symbolic link"):
        check_seal(run)


def test_an_unfinished_run_is_not_sealed(run: Path) -> None:
    (run / "results" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"cannot be sealed: .*not finished"):
        seal(run)


def test_a_signature_says_who_vouches(run: Path, tmp_path: Path) -> None:
    secret, public = keys(tmp_path, "mine")
    other = keys(tmp_path, "other")[1]
    seal(run, secret)
    mine = fingerprint_of(str(public))
    found = check_seal(run, str(public))
    assert found and found.signer == mine and mine in str(found)
    assert check_seal(run, mine) and not check_seal(run, str(other))
    assert "not by the key that was asked for" in str(check_seal(run, str(other)))
    if shutil.which("ssh-keygen") is not None:
        words = ["ssh-keygen", "-lf", str(public)]
        shown = subprocess.run(words, capture_output=True, text=True, check=True)
        assert mine in shown.stdout
    content = json.loads((run / "seal.json").read_text())
    content["claim"]["versions"]["wassail"] = "9.9"
    (run / "seal.json").write_text(json.dumps(content))
    assert "its signature is not valid" in str(check_seal(run))
    seal(run)
    assert not check_seal(run, mine)  # without a signature nobody vouches
    for name in ("x.pem", "run"):
        with pytest.raises(InputError):
            seal(run, tmp_path / name)


def test_without_the_library_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    assert check_seal(Path(seal(run)).parent)  # the digest needs none
    key = run.parent / "key"
    key.write_text("x")
    with pytest.raises(InputError, match=r'pip install "wassail\[seal\]"'):
        seal(run, key)


def test_verify_reads_the_seal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(run), "digits-mlp", "--data", "digits", "--seal"]
    assert main(words) == 2
    assert "has no seal" in capsys.readouterr().err
    seal(run)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "fits: nothing changed since" in said and "file seal.json" in said
    assert "file seal.json" not in said.split("fields not checked")[1]
    assert main([*words, "SHA256:abc"]) == 1
    assert "signed by no valid key" in capsys.readouterr().out


def test_the_board_keeps_claims_apart(run: Path, tmp_path: Path) -> None:
    loaded = ws.Evaluation.load(run)
    assert standing(loaded).kind == CLAIM
    seal(run)
    assert standing(loaded).kind == CLAIM and "without a signature" in standing(loaded).text
    assert standing(loaded, verify=True).kind == VERIFIED
    stands = [standing(loaded, verify=True), standing(loaded)]
    write_board([loaded, loaded], tmp_path / "site", (), stands)
    index = (tmp_path / "site" / "index.html").read_text()
    assert index.index("Verified again by the maker") < index.index("Claims: what the runs state")
    feed = json.loads((tmp_path / "site" / "board.json").read_text())
    assert [entry["standing"] for entry in feed["runs"]] == [VERIFIED, CLAIM]


def test_the_board_knows_its_signers(run: Path, tmp_path: Path) -> None:
    secret, public = keys(tmp_path, "mine")
    seal(run, secret)
    loaded = ws.Evaluation.load(run)
    assert standing(loaded).kind == CLAIM and "unknown key" in standing(loaded).text
    assert standing(loaded, [str(public)]).kind == SEALED
    (run / "results" / "summary.json").write_text("{}")
    assert standing(loaded, [str(public)]).kind == CLAIM
