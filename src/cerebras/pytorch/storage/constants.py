"""Names that stand in checkpoint files (`docs/checkpoint-format.md`)."""

import torch

__CSTORCH_VERSION__ = "__cstorch_version__"

# The extension: what version 0.5 cannot hold. A file that uses it says so in this root attribute.
EXTENSION_ATTR = "__cstorch_extension__"
EXTENSION_VERSION = 1
TREE_ATTR = "__cstorch_tree__"
STORAGE_KEY = "__cstorch_storage__"

TYPE = "__TYPE__"
NUMPY = "__NUMPY__"
TORCH = "__TORCH__"
BYTES = "__BYTES__"
NONE = "__NONE__"
LINKED = "__LINKED__"

# dtype -> the code that version 0.5 stores beside it. These dtypes are in the layout, all others in the extension.
RTFX_DTYPES = {
    torch.bool: 1,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
    torch.uint16: 7,
    torch.uint32: 8,
    torch.uint64: 9,
    torch.float16: 10,
    torch.float32: 11,
    torch.float64: 12,
    torch.bfloat16: 15,
}


def _dtypes(*names: str) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


# dtypes numpy lacks -> the integer dtype that carries their bits in the file
BIT_DTYPES = {torch.bfloat16: torch.int16} | {
    dtype: torch.uint8
    for dtype in _dtypes(
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"
    )
}
if hasattr(torch, "complex32"):
    BIT_DTYPES[torch.complex32] = torch.int32

EXTENSION_DTYPES = (torch.int8, torch.complex64, torch.complex128, *(d for d in BIT_DTYPES if d != torch.bfloat16))
DTYPES = {str(dtype): dtype for dtype in (*RTFX_DTYPES, *EXTENSION_DTYPES)}
