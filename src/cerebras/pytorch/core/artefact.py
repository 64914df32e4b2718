"""A compiled step on disk that starts without TorchInductor.

TorchInductor's output is a Python module: a list of C++ kernels and a function that calls them. Importing it through
TorchInductor costs seconds (its own import, sympy, and a hash of every kernel's build command), so beside its cache an
entry keeps `step.py`, the same module with the kernels named by their shared libraries and without the imports.

Notes:
1. Only what is known is written this way: kernels bound by `cpp_pybinding`, no tensor constants, no other imports. The
   rest goes through TorchInductor's cache.
2. Nothing is unpickled. `step.py` is code of the compile cache's owner, like the shared libraries beside it.
"""

import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

SOURCE = "step.py"
KERNELS = "kernels.json"

# What the generated module imports from torch._inductor, and whether its call uses it.
_UNUSED = {"run_intermediate_hooks", "maybe_profile", "_align", "AsyncCompile"}
_PROVIDED = {"extern_kernels"}
_ENTRY = "kernel"  # the name that TorchInductor gives the function of every library


class _ExternKernels:
    """ATen's products under the names that the generated code uses."""

    mm, bmm, addmm, baddbmm = map(staticmethod, (torch.mm, torch.bmm, torch.addmm, torch.baddbmm))
    convolution = staticmethod(torch.ops.aten.convolution)


def save(compiled, entry: Path, libraries: Path) -> object | None:
    """Writes a `CompiledFxGraph` into `entry`, where it is one of the known kind.

    Args:
        compiled: what `compile_fx_inner` returned.
        entry: where `step.py` goes; `libraries` is TorchInductor's cache, inside it.

    Returns:
        The bare function of the compiled step, None where the artefact is of another kind and nothing was written.
    """
    module = _module_of(compiled)
    if module is None or getattr(compiled, "constants", None):
        return None
    source = _standalone(compiled.source_code)
    if source is None:
        return None
    text, names = source
    paths = {}
    for name in names:
        library = getattr(getattr(getattr(module, name, None), "__self__", None), "__file__", None)
        if library is None or not Path(library).is_relative_to(libraries):
            return None
        paths[name] = str(Path(library).relative_to(entry))
    (entry / SOURCE).write_text(text)
    (entry / KERNELS).write_text(json.dumps(paths, indent=1))
    return module.call


def load(entry: Path):
    """The function of the step saved in `entry`, None where there is none in this form. The files were verified."""
    source = entry / SOURCE
    if not source.exists():
        return None
    space = {"__name__": f"cstorch_step_{entry.name}", "extern_kernels": _ExternKernels}
    loaded: dict[str, object] = {}
    for name, path in json.loads((entry / KERNELS).read_text()).items():
        if path not in loaded:
            loaded[path] = _load_library(entry / path)
        space[name] = loaded[path]
    exec(compile(source.read_text(), str(source), "exec"), space)
    return space["call"]


def _module_of(compiled):
    cache = sys.modules["torch._inductor.codecache"].PyCodeCache
    key = getattr(compiled, "cache_key", None)
    if not isinstance(getattr(compiled, "source_code", None), str) or key is None:
        return None
    return next((m for m in reversed(cache.modules) if Path(m.__file__ or "").stem == key), None)


def _standalone(source: str) -> tuple[str, list[str]] | None:
    """The generated module without TorchInductor's imports and kernels, and the kernels' names."""
    tree = ast.parse(source)
    body, kernels = [], []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
            names = {alias.name for alias in node.names}
            if not names <= _UNUSED | _PROVIDED:
                return None
            continue
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called == "AsyncCompile":
                continue
            if called.startswith("async_compile."):
                if called != "async_compile.cpp_pybinding":
                    return None
                kernels.append(node.targets[0].id)
                continue
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("async_compile.wait("):
            continue
        if isinstance(node, ast.Delete) and ast.unparse(node) == "del async_compile":
            continue
        if isinstance(node, ast.FunctionDef) and node.name in ("benchmark_compiled_module", "get_args"):
            continue
        if isinstance(node, ast.If):  # `if __name__ == "__main__"`: a benchmark
            continue
        body.append(node)
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "extern_kernels":
            if not hasattr(_ExternKernels, node.attr):
                return None
        if isinstance(node, ast.Name) and node.id in ("async_compile", *_UNUSED):
            return None
    return ast.unparse(ast.Module(body, [])) + "\n", kernels


def _load_library(path: Path):
    """The kernel in a library that TorchInductor built with its Python binding."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
    )
    name = f"{path.name.split('.')[0]}.{_ENTRY}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
    loader.exec_module(module)
    return getattr(module, _ENTRY)
