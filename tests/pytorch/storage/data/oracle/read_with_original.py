"""Run with cerebras-pytorch 2.10.0: writes what it reads from each file as JSON. `python read_with_original.py DIRECTORY`."""

import glob
import json
import os
import sys

import numpy as np
import torch

import cerebras.pytorch as cstorch


def describe(value):
    if isinstance(value, torch.Tensor):
        tensor = value.clone()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"kind": "tensor", "dtype": dtype, "shape": list(tensor.shape), "data": tensor.reshape(-1).tolist()}
    if isinstance(value, np.ndarray) or "Numpy" in type(value).__name__:
        array = np.asarray(value)
        return {
            "kind": "ndarray",
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "data": array.reshape(-1).tolist(),
        }
    if isinstance(value, dict):
        items = [[describe(key), describe(child)] for key, child in value.items()]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, (list, tuple)):
        return {"kind": type(value).__name__, "items": [describe(child) for child in value]}
    if isinstance(value, set):
        return {"kind": "set", "items": [{"value": item} for item in sorted(value)]}
    if value is None:
        return {"kind": "none"}
    return {"kind": type(value).__name__, "value": value}


def read(path):
    try:
        loaded = cstorch.load(path)
        out = describe(loaded)
        if os.path.basename(path) == "shared.mdl":
            out["tied"] = loaded["emb"]["w"] is loaded["head"]["w"] is loaded["alias"]
    except Exception as error:
        return {"kind": "error", "message": f"{type(error).__name__}: {error}"}
    return out


files = sorted(glob.glob(os.path.join(sys.argv[1], "*.mdl")))
out = {"package": f"cerebras-pytorch {cstorch.__version__}, torch {torch.__version__}"}
out.update((os.path.basename(path), read(path)) for path in files)
with open(os.path.join(sys.argv[1], "read.json"), "w") as file:
    json.dump(out, file, ensure_ascii=False)
