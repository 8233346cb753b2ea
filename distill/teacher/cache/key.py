"""The name of a sample: a hash of what the teacher sees of it."""

from hashlib import blake2b

import numpy as np
from torch import Tensor

KEY_BYTES = 16


def sample_key(input_ids: np.ndarray, token_type_ids: np.ndarray | None = None) -> bytes:
    """128-bit hash of the unpadded ids and, where the model has them, token types; both [length] integers."""
    total = blake2b(input_ids.astype("<i4").tobytes(), digest_size=KEY_BYTES)
    if token_type_ids is not None:
        total.update(token_type_ids.astype("<i4").tobytes())
    return total.digest()


def sample_keys(batch: dict[str, Tensor]) -> list[bytes]:
    """Keys of a padded batch; how it was padded makes no difference. Ids, mask and types are [batch, length]."""
    ids, mask = batch["input_ids"].cpu().numpy(), batch["attention_mask"].cpu().numpy().astype(bool)
    types = batch["token_type_ids"].cpu().numpy() if "token_type_ids" in batch else None
    return [sample_key(ids[i][m], types[i][m] if types is not None else None) for i, m in enumerate(mask)]
