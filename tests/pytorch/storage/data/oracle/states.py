"""The states whose files the original package was run on. `python states.py DIRECTORY` writes the files.

Reading them: `read_with_original.py`, in an environment with cerebras-pytorch 2.10.0.
"""

import collections

import numpy as np
import torch

from cerebras.pytorch import storage

Point = collections.namedtuple("Point", "x y")


def states():
    """Name -> state, and the options of `save`."""
    base = torch.arange(12.0).reshape(3, 4) / 4 - 1
    dtypes = {
        str(dtype).removeprefix("torch."): base.to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int16, torch.int32)
    }
    tied = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 8, (64, 512), generator=generator).float()
    moments = {
        index: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 2), index + 0.5), "exp_avg_sq": torch.ones(2, 2)}
        for index in range(2)
    }
    return {
        "tensors": (
            dtypes
            | {"int64": torch.arange(3), "uint8": torch.arange(3, dtype=torch.uint8), "0-d": torch.tensor(2.5)}
            | {
                "empty": torch.zeros(0),
                "empty 2-d": torch.zeros(0, 3),
                "transposed": torch.arange(6.0).reshape(2, 3).t(),
            }
            | {"a.b": torch.ones(2), "c/d": torch.ones(3), "ünï": torch.ones(1)},
            {},
        ),
        "structure": (
            {
                "list": [1, 2.5, True, None, "s é", float("inf"), 10**30],
                "ordered": collections.OrderedDict(y=1, x=[2]),
                "tuple": (1, (2,)),
                "set": {1, 2},
                "empty": [{}, [], ()],
                3: {1: "int keys"},
            },
            {},
        ),
        "named tuple": ({"p": Point(1, [torch.ones(2)])}, {}),
        "numpy": ({"f": np.arange(6.0).reshape(2, 3), "i": np.arange(3), "0-d": np.array(2.5)}, {}),
        "shared": ({"emb": {"w": tied}, "head": {"w": tied}, "alias": tied.detach()}, {}),
        "fills": (
            {
                "f": storage.DeferredFullTensor((2, 3), torch.float32, 0.5),
                "i": storage.DeferredFullTensor((2,), torch.int64, 7),
                "inf": storage.DeferredFullTensor((2,), torch.bfloat16, float("inf")),
            },
            {},
        ),
        "training": (
            {
                "model": {"fc.weight": torch.arange(4.0).reshape(2, 2), "fc.bias": torch.ones(2)},
                "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]},
                "global_step": 3,
            },
            {},
        ),
        "lz4": ({"w": large}, {"compression": "lz4"}),
        "zstd": ({"w": large}, {"compression": "zstd"}),
        "extension": ({"i8": torch.ones(2, dtype=torch.int8)}, {}),
    }


if __name__ == "__main__":
    import os
    import sys

    for name, (state, options) in states().items():
        path = os.path.join(sys.argv[1], f"{name}.mdl")
        if os.path.exists(path):
            os.unlink(path)
        storage.save(state, path, **options)
