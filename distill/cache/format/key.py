"""Key of a sample: a hash of the inputs that the teacher receives."""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
from torch import Tensor

KEY_BYTES = 16


def sample_key(
    input_ids: np.ndarray,
    token_type_ids: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    documents: np.ndarray | None = None,
) -> bytes:
    """Returns the 128-bit BLAKE2b of the unpadded ids and any token types, selected positions and documents.

    Args:
        input_ids: [length] integers, hashed as little-endian int32.
        token_type_ids: [length] integers, hashed after the ids in the same way.
        positions: [length] booleans, the positions whose distributions are stored; hashed as the byte `p` and one byte
            each.
        documents: [length] integers, the document of a packed row that each token belongs to; hashed as the byte `d`
            and little-endian int32.
    """
    digest = blake2b(input_ids.astype("<i4").tobytes(), digest_size=KEY_BYTES)
    if token_type_ids is not None:
        digest.update(token_type_ids.astype("<i4").tobytes())
    if positions is not None:
        digest.update(b"p" + positions.astype(np.uint8).tobytes())
    if documents is not None:
        digest.update(b"d" + documents.astype("<i4").tobytes())
    return digest.digest()


def sample_keys(batch: Mapping[str, Tensor]) -> list[bytes]:
    """Returns the keys of a padded batch, independent of its padding. Ids, mask and types are [batch, length]."""
    names = ("token_type_ids", "positions", "documents")
    fields = [batch[name].cpu().numpy() if name in batch else None for name in names]
    ids, mask = batch["input_ids"].cpu().numpy(), batch["attention_mask"].cpu().numpy().astype(bool)
    return [sample_key(ids[i][m], *(f[i][m] if f is not None else None for f in fields)) for i, m in enumerate(mask)]
