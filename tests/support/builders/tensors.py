# SPDX-License-Identifier: Apache-2.0
"""Small helpers on tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.builders.known_answers import BLOCK_HASH, PUBLIC_KEY
from vllm_poc.maths.sampling import nonce_seeds

#: Where the formulas are tested: on a GPU if there is one.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def known_hidden(size: int) -> Tensor:
    """The known answers' hidden state ``[1, size]``: h[j] = (((7jj + 3j + 1) mod 31) - 15) / 16."""
    values = [((7 * j * j + 3 * j + 1) % 31 - 15) / 16 for j in range(size)]
    return torch.tensor([values], dtype=torch.float32)


def seed_rows(nonces: Sequence[int], purposes: Sequence[str]) -> Tensor:
    """The seeds of the known answers' round: int64 ``[nonces, purposes]``."""
    return torch.tensor([nonce_seeds(BLOCK_HASH, PUBLIC_KEY, nonce, purposes) for nonce in nonces])


def assert_close(actual: Tensor, expected: Sequence[object], tolerance: float) -> None:
    """Compare element by element with an absolute tolerance."""
    torch.testing.assert_close(actual.to(torch.float32), torch.tensor(expected), rtol=0, atol=tolerance)


def bits(values: Tensor) -> list[int]:
    """The bit patterns of a 16-bit float tensor as unsigned integers."""
    return [word & 0xFFFF for word in values.flatten().view(torch.int16).tolist()]


def ulp_distance(actual: Sequence[int], expected: Sequence[int]) -> int:
    """Largest number of representable 16-bit floats between two lists of bit patterns."""
    return max(abs(_rank(a) - _rank(b)) for a, b in zip(actual, expected, strict=True))


def _rank(word: int) -> int:
    # Sign and magnitude to a number line on which -0 and +0 meet.
    return word if word < 0x8000 else 0x8000 - word
