"""A seal on a run: one digest of everything that its claims rest on, and perhaps a signature.

The digest covers the results, the configuration, the version of the code, and the digests of model
and data. It shows that nothing has changed since the seal was made. Who vouches for the run is
shown by a signature with an Ed25519 key, for which `cryptography` is needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from wassail.errors import InputError
from wassail.evaluation.reading import SMOOTHED
from wassail.evaluation.smoothed import ATTACK, VOTES, is_smoothed, read_smoothing
from wassail.evaluation.store.encoding import checksum, dumps, encode, parsed, read_bytes
from wassail.evaluation.store.store import Store
from wassail.writing import MAX_TEXT, check_links, read_small, save

SEAL = "seal.json"
FORMAT = "wassail seal 1"
KEY_BYTES = 1 << 16  # of a file with a key
MISSING = 'signatures need the package cryptography: pip install "wassail[seal]".'
SIGNATURE = {"algorithm", "key", "value"}
_KIND = b"ssh-ed25519"


@dataclass(frozen=True)
class Seal:
    """What a seal says.

    Args:
        digest: SHA-256 of the claim.
        signer: fingerprint of the key that signed it, as `ssh-keygen -l` prints it; None without a
            signature.
        problems: what does not fit: files that changed since, a signature that is none.
    """

    digest: str
    signer: str | None
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "its seal does not fit: " + " ".join(self.problems)
        if self.signer is None:
            return (
                f"the seal {self.digest[:16]} fits: nothing changed since it was made; it has no "
                "signature, so it does not say by whom."
            )
        return (
            f"the seal {self.digest[:16]} fits, and the holder of the Ed25519 key {self.signer} "
            "vouches for it."
        )


def seal(folder: str | PathLike[str], key: str | PathLike[str] | None = None) -> Path:
    """Write `seal.json` into the folder of a run, and return its path.

    Args:
        folder: of a finished run, or of a smoothed model.
        key: file with an Ed25519 private key, PEM or OpenSSH, that signs it; default None.
    """
    return save(Path(folder) / SEAL, sealed(claim_of(folder), key))


def sealed(claim: Mapping[str, Any], key: str | PathLike[str] | None = None) -> str:
    """The text of a seal: a claim, its digest, and perhaps a signature.

    Args:
        claim: plain values.
        key: file with an Ed25519 private key that signs it; default None.
    """
    text = dumps(claim).encode()
    signature = None if key is None else _signed(text, key)
    content = {"claim": claim, "digest": hashlib.sha256(text).hexdigest(), "signature": signature}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def claim_of(folder: str | PathLike[str]) -> dict[str, Any]:
    """Everything that the claims of a run rest on, by digest.

    folder: of a finished run, or of a smoothed model.
    """
    place = Path(folder)
    if is_smoothed(folder):
        about = read_smoothing(folder)
        names = [SMOOTHED, VOTES, *([] if about.get("attack") is None else [ATTACK])]
        facts = {"versions": str(about.get("made by")), "model": about["model"]}
        return _claim("smoothing", place, names, {**facts, "data": str(about.get("data"))})
    store = Store.open(folder)
    problems = store.verify()
    if problems:
        raise InputError(f"the run in {str(folder)!r} cannot be sealed: {problems[0]}")
    names = sorted(
        path.relative_to(place).as_posix()
        for path in (place / "results").rglob("*")
        if path.is_file()
    )
    config = store.config
    facts = {key: encode(config.get(key), key) for key in ("versions", "model", "data")}
    return _claim("evaluation", place, ["config.json", *names], facts)


def _claim(kind: str, place: Path, names: list[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "kind": kind, "files": digests(place, names), **facts}


def digests(place: Path, names: Iterable[str]) -> dict[str, Any]:
    """Size and SHA-256 of files below a folder, by name; no link is followed.

    names: of the files, relative to it.
    """
    files = {}
    for name in names:
        check_links(place / name, place)
        try:
            files[name] = checksum(place / name)
        except (OSError, ValueError) as error:
            raise InputError(f"{name!r} in {str(place)!r} cannot be read: {error}.") from None
    return files


def check_seal(folder: str | PathLike[str], signer: str | None = None) -> Seal:
    """Whether the seal of a run fits it, and who vouches for it.

    Args:
        folder: of a run.
        signer: the key that must have signed it: a file with a public key, PEM or OpenSSH, or its
            fingerprint `SHA256:...`; default None, any or none.
    """
    claim, known = read_seal(folder, signer)
    return replace(known, problems=(*known.problems, *differences(claim, claim_of(folder))))


def read_seal(folder: str | PathLike[str], signer: str | None = None) -> tuple[Any, Seal]:
    """The claim of the seal in a folder, and what its digest and its signature say; whether the
    claim is that of the folder is not looked at.

    folder: with a `seal.json`; signer: as in `check_seal`.
    """
    file = Path(folder) / SEAL
    check_links(file, folder)
    try:
        content = parsed(read_bytes(file, MAX_TEXT, whole=True).decode())
        claim = content["claim"]
        text = dumps(claim).encode()
        digest = hashlib.sha256(text).hexdigest()
        signature = content["signature"]
        stated = content["digest"]
        if len(content) != 3 or (signature is not None and set(signature) != SIGNATURE):
            raise ValueError("parts that no digest and no signature covers")
    except OSError as error:
        raise InputError(
            f"{str(folder)!r} has no seal that can be read ({error.strerror}): `wassail seal` "
            "makes one."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{str(file)!r} is no seal: `wassail seal` makes one.") from None
    problems = [] if stated == digest else ["its digest is not that of its claim."]
    found = None
    if signature is not None:
        found = _signer(text, signature)
        if found is None:
            problems.append("its signature is not valid.")
    if signer is not None and found != fingerprint_of(signer):
        by = "no valid key" if found is None else found
        problems.append(f"it is signed by {by}, and not by the key that was asked for.")
    return claim, Seal(digest, found, tuple(problems))


def differences(stated: Any, found: Mapping[str, Any]) -> list[str]:
    """Where the claim of a seal is not that of the folder.

    stated: the claim in the seal, of any origin; found: the claim that the folder makes.
    """
    if stated == found:
        return []
    listed = stated.get("files") if isinstance(stated, Mapping) else None
    if not isinstance(listed, Mapping):
        return ["it is of something else."]
    names = sorted({*map(str, listed), *found["files"]})
    changed = [name for name in names if listed.get(name) != found["files"].get(name)]
    if not changed:
        return ["it names another model, other data or another version than the run."]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return [f"since it was made these changed: {', '.join(changed[:3])}{more}."]


def fingerprint_of(signer: str) -> str:
    """The fingerprint of a public key, as `ssh-keygen -l` prints it.

    signer: a file with a public key, PEM or OpenSSH, or a fingerprint, which is returned.
    """
    if signer.startswith("SHA256:"):
        return signer
    data = read_small(signer, KEY_BYTES, "a public key")
    serialization, ed25519 = _library()
    for load in (serialization.load_ssh_public_key, serialization.load_pem_public_key):
        try:
            key = load(data)
        except Exception:  # the library raises errors of several kinds
            continue
        if isinstance(key, ed25519.Ed25519PublicKey):
            return _print(key.public_bytes_raw())
    raise InputError(f"{signer!r} holds no Ed25519 public key: give one in PEM or OpenSSH form.")


def _print(raw: bytes) -> str:
    """The fingerprint of a key of 32 bytes."""
    blob = b"".join(struct.pack(">I", len(part)) + part for part in (_KIND, raw))
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise InputError(MISSING) from None
    return serialization, ed25519


def _signed(text: bytes, path: str | PathLike[str]) -> dict[str, str]:
    """The signature of a claim with the key in a file."""
    serialization, ed25519 = _library()
    data = read_small(path, KEY_BYTES, "a private key")
    for load in (serialization.load_pem_private_key, serialization.load_ssh_private_key):
        try:
            key = load(data, password=None)
        except Exception:  # the library raises errors of several kinds
            continue
        if isinstance(key, ed25519.Ed25519PrivateKey):
            return {
                "algorithm": "ed25519",
                "key": base64.b64encode(key.public_key().public_bytes_raw()).decode(),
                "value": base64.b64encode(key.sign(_message(text))).decode(),
            }
    raise InputError(
        f"{str(path)!r} holds no Ed25519 private key without a password: make one with "
        "`openssl genpkey -algorithm ed25519 -out KEY`."
    )


def _signer(text: bytes, signature: Any) -> str | None:
    """The fingerprint of the key that made a signature; None if it is not valid."""
    _, ed25519 = _library()
    try:
        raw = base64.b64decode(signature["key"], validate=True)
        value = base64.b64decode(signature["value"], validate=True)
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(value, _message(text))
    except Exception:  # no key, no signature, or not of this claim
        return None
    return _print(raw)


def _message(text: bytes) -> bytes:
    return FORMAT.encode() + b"\n" + text
