"""Fifty forged packs and more: none is accepted."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from support.forged import network, samples
from support.forged_packs import FORGED_RUNS, PACKS, REWRITTEN, another_model, good_pack
from wassail.errors import InputError
from wassail.evaluation.reading import ODD
from wassail.evidence.pack import check_pack_seal, opened, write_zip
from wassail.evidence.verify import check_files, load, verify_pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return good_pack(tmp_path_factory.mktemp("made") / "pack")


def accepted(place: Path, radii: float) -> str | None:
    """None if the pack is refused or something in it is found false, else what was said."""
    with suppress(InputError):
        found, _ = verify_pack(place, network(), samples(), radii, seed=0)
        return str(found) if found else None
    return None


def test_there_are_fifty() -> None:
    assert len(PACKS) >= 50 and len(FORGED_RUNS) >= 30


@pytest.mark.few(3)
@pytest.mark.parametrize("name", list(PACKS)[::5])  # all of them below, which takes longer
def test_a_forged_pack_does_not_fit_its_run(name: str, made: Path, tmp_path: Path) -> None:
    """By the seal and the files alone, without the model."""
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    PACKS[name](place)
    with suppress(InputError):
        run = load(place)
        assert not check_pack_seal(place, run) or check_files(place, run)[0]


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_zip_that_says_more_than_its_pack_is_refused(
    name: str, made: Path, tmp_path: Path
) -> None:
    path = write_zip(Path(shutil.copytree(made, tmp_path / "pack")))
    REWRITTEN[name](path)
    with pytest.raises(InputError, match="pack"), opened(path):
        pass


@pytest.mark.slow
def test_another_model_in_the_pack(made: Path, tmp_path: Path) -> None:
    """What is verified is the model that the reader gives; the file in the pack is compared."""
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    another_model(place)
    given = verify_pack(place, network(), samples(), 0.0, seed=0, files={"net.onnx": "ab" * 32})[0]
    assert given.problems == ("model.onnx is not the file of the model that was given.",)
    code = verify_pack(place, network(), samples(), 0.0, seed=0, files={"weights.pt": "ab" * 32})[0]
    assert "whether model.onnx is the model that was given." in code.unchecked


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKS)
def test_a_forged_pack_is_not_accepted(name: str, made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    PACKS[name](place)
    assert accepted(place, 0.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED_RUNS)
def test_a_pack_of_a_forged_run_is_not_accepted(name: str, made: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(made, tmp_path / "pack"))
    with suppress(*ODD):  # what makes no sense cannot be packed either
        FORGED_RUNS[name](place)
    assert accepted(place, 1.0) is None
