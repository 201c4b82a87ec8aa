# SPDX-License-Identifier: Apache-2.0
import hashlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")

from torch import Tensor  # noqa: E402

from vllm_poc.maths import decode  # noqa: E402
from vllm_poc.maths.decode import FROZEN, CodebookHashes  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def rebuilt() -> Tensor:
    return decode.rebuild_codebook()


def saved(path: Path, content: object) -> CodebookHashes:
    """Write the file and return its hashes; of the numbers only where it has some."""
    torch.save(content, path)
    numbers = decode.numbers_hash(content) if isinstance(content, Tensor) else "none"
    return CodebookHashes(hashlib.sha256(path.read_bytes()).hexdigest(), numbers)


def test_rebuilt_points_lie_apart_as_the_networks_do(rebuilt: Tensor) -> None:
    assert (rebuilt.shape, rebuilt.dtype, rebuilt.device.type) == ((16, 256), torch.float32, "cpu")
    torch.testing.assert_close(rebuilt.norm(dim=1), torch.ones(16, device="cpu"), rtol=0, atol=1e-6)
    cosines = (rebuilt @ rebuilt.T)[~torch.eye(16, dtype=torch.bool, device="cpu")]
    assert -0.0939 < cosines.min() < -0.0937
    assert -0.0619 < cosines.max() < -0.0617
    assert cosines.mean().item() == pytest.approx(-1 / 15, abs=1e-4)


def test_rebuilt_points_are_the_same_where_gradients_are_off(rebuilt: Tensor) -> None:
    with torch.inference_mode():
        again = decode.rebuild_codebook()
    torch.testing.assert_close(again, rebuilt, rtol=0, atol=1e-5)


def test_a_file_is_taken_as_stored(tmp_path: Path, rebuilt: Tensor) -> None:
    hashes = saved(tmp_path / "book.pt", rebuilt)
    assert torch.equal(decode.load_codebook(tmp_path / "book.pt", hashes), rebuilt)


def test_the_frozen_hashes_refuse_a_rebuilt_file(tmp_path: Path, rebuilt: Tensor) -> None:
    saved(tmp_path / "book.pt", rebuilt)
    with pytest.raises(ValueError, match=rf"^codebook .*book\.pt has the SHA-256 .*, not {FROZEN.file}"):
        decode.open_codebook(tmp_path / "book.pt")


def test_other_numbers_in_the_file_are_refused(tmp_path: Path, rebuilt: Tensor) -> None:
    hashes = saved(tmp_path / "book.pt", rebuilt)._replace(numbers=FROZEN.numbers)
    with pytest.raises(ValueError, match=rf"numbers in codebook .* not {FROZEN.numbers}"):
        decode.load_codebook(tmp_path / "book.pt", hashes)


@pytest.mark.parametrize("content", [{"points": 1}, torch.zeros(16, 255, device="cpu"), torch.zeros(256, device="cpu")])
def test_something_else_in_the_file_is_refused(tmp_path: Path, content: object) -> None:
    hashes = saved(tmp_path / "book.pt", content)
    with pytest.raises(ValueError, match=r"holds no tensor of shape \[16, 256\]"):
        decode.load_codebook(tmp_path / "book.pt", hashes)


def test_a_file_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book.pt").write_bytes(b"nothing that PyTorch saved")
    hashes = FROZEN._replace(file=hashlib.sha256(b"nothing that PyTorch saved").hexdigest())
    with pytest.raises(ValueError, match="holds no tensor: use the network's file"):
        decode.load_codebook(tmp_path / "book.pt", hashes)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.pt cannot be read \(No such file or directory\)"):
        decode.open_codebook(tmp_path / "gone.pt")


def test_rebuilding_has_to_be_asked_for_and_is_told(tmp_path: Path) -> None:
    assert decode.open_codebook(None, rebuild=True).rebuilt
    with pytest.raises(ValueError, match=r"give the path of its sphere_codebook\.pt"):
        decode.open_codebook(None)
    with pytest.raises(ValueError, match="ask for one of them"):
        decode.open_codebook(tmp_path / "book.pt", rebuild=True)
