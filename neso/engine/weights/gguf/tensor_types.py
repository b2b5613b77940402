"""How GGUF stores the values of a tensor, by the numbers and names that ggml gives the types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class TensorType:
    """Blocks of `block_size` neighbouring values of a row take `block_bytes` bytes each.

    `dtype` is that of the values themselves; None for the quantized types.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, np.dtype(np.float32)),
    1: TensorType("F16", 1, 2, np.dtype(np.float16)),
    2: TensorType("Q4_0", 32, 18),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
}

# Types that are not read, so that a refusal can say their names.
OTHER_TYPES: dict[int, str] = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
