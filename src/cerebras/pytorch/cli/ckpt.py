"""`cstorch ckpt`: look at, compare, convert and verify checkpoints.

Exit status: 0 well; 1 the files differ, or are damaged; 2 the command could not do its work.
"""

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

_HDF5 = (".mdl", ".h5", ".hdf5", ".ckpt")
_TORCH = (".pt", ".pth", ".bin")


@click.group()
def ckpt() -> None:
    """Checkpoints: of this package and the original (HDF5), of torch.save, of safetensors."""


class _Failure(click.ClickException):
    exit_code = 2


def _command(function):
    """Adds --json and --allow-pickle, and turns errors of files into a message and exit status 2."""

    @functools.wraps(function)
    def run(*args, as_json: bool, **kwargs):
        try:
            return function(*args, as_json=as_json, **kwargs)
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            if as_json:
                click.echo(json.dumps({"error": str(error)}))
                raise SystemExit(2) from error
            raise _Failure(str(error)) from error

    run = click.option("--allow-pickle", is_flag=True, help="Unpickle entries: only for files you trust.")(run)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(run)


_file = functools.partial(click.argument, type=click.Path(path_type=Path))


def _leaves(obj: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        for name, value in zip(obj._fields, obj):
            yield from _leaves(value, (*path, name))
    elif isinstance(obj, (list, tuple)) and type(obj).__name__ != "Size":
        for index, value in enumerate(obj):
            yield from _leaves(value, (*path, index))
    else:
        yield path, obj


def _name(path: tuple) -> str:
    return ".".join(map(str, path)) or "(the whole)"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _describe(value: Any) -> dict[str, Any]:
    """One leaf for `info`."""
    import numpy as np
    import torch

    from ..storage import DeferredFullTensor

    if isinstance(value, (torch.Tensor, np.ndarray)):
        out = {
            "kind": "tensor" if isinstance(value, torch.Tensor) else "array",
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "bytes": value.nbytes,
        }
        if isinstance(value, DeferredFullTensor):
            out |= {"fill": repr(value.fill_value), "bytes": 0}
        return out
    text = repr(value)
    return {"kind": type(value).__name__, "value": text if len(text) <= 60 else text[:57] + "..."}


def _memory_of(tensor: Any):
    """Equal for tensors that share their memory."""
    from ..storage import DeferredTensor

    if isinstance(tensor, DeferredTensor):
        base = getattr(tensor._cell.source, "base", None)
        return id(base if base is not None else tensor._cell)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _shared_groups(leaves) -> list[list[str]]:
    import torch

    groups: dict[Any, list[str]] = {}
    for path, value in leaves:
        if isinstance(value, torch.Tensor) and value.numel():
            groups.setdefault(_memory_of(value), []).append(_name(path))
    return [names for names in groups.values() if len(names) > 1]


@ckpt.command()
@_file("file")
@_command
def info(file: Path, as_json: bool, allow_pickle: bool) -> None:
    """Prints the tree of FILE: shapes, dtypes, bytes, and which tensors share memory. Reads no tensor."""
    from .. import storage

    state = storage.load(file, allow_pickle=allow_pickle)
    leaves = list(_leaves(state))
    shared = _shared_groups(leaves)
    again = {name for names in shared for name in names[1:]}
    entries = [{"name": _name(path)} | _describe(value) for path, value in leaves]
    total = sum(entry.get("bytes", 0) for entry in entries if entry["name"] not in again)
    size = file.stat().st_size
    tensors = sum(entry["kind"] == "tensor" for entry in entries)
    if as_json:
        summary = {"file": str(file), "file_bytes": size, "tensors": tensors, "tensor_bytes": total}
        click.echo(json.dumps(summary | {"entries": entries, "shared": shared}))
        return
    shown: tuple = ()
    for (path, _), entry in zip(leaves, entries):
        parents = path[:-1]
        common = len(os.path.commonprefix([shown, parents]))
        for depth in range(common, len(parents)):
            click.echo("  " * depth + str(parents[depth]))
        shown = parents
        if "shape" in entry:
            where = f"= {entry['fill']}" if "fill" in entry else _bytes(entry["bytes"])
            what = f"{entry['dtype']} {entry['shape']}  {where}" + ("  shared" if entry["name"] in again else "")
        else:
            what = f"{entry['kind']} {entry['value']}"
        click.echo("  " * len(parents) + f"{path[-1] if path else '(the whole)'}: {what}")
    for names in shared:
        click.echo("shared: " + ", ".join(names))
    click.echo(f"{len(entries)} entries, {tensors} tensors, {_bytes(total)} of data, file {_bytes(size)}")


def _compare(a: Any, b: Any) -> dict[str, Any] | None:
    """How two leaves differ; None where they do not."""
    import numpy as np
    import torch

    a, b = (torch.from_numpy(v) if isinstance(v, np.ndarray) and v.dtype.kind in "biufc" else v for v in (a, b))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or type(a) is not type(b):
            return {"reason": f"{type(a).__name__} and {type(b).__name__}"}
        same = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b or repr(a) == repr(b)
        return None if same else {"reason": f"{a!r} and {b!r}"[:200]}
    if a.shape != b.shape:
        return {"reason": f"shapes {list(a.shape)} and {list(b.shape)}"}
    out: dict[str, Any] = {"reason": f"dtypes {a.dtype} and {b.dtype}"} if a.dtype != b.dtype else {}
    a, b = a.clone(), b.clone()
    if not out and torch.equal(a, b):
        return None
    wide = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    x, y = a.to(wide), b.to(wide)
    error = (x - y).abs()
    same = (x == y) | (x.isnan() & y.isnan())
    error[same] = 0
    if not out and bool(same.all()) and (a.is_floating_point() or a.is_complex()):
        return None
    relative = error / torch.maximum(x.abs(), y.abs())
    relative[same] = 0
    worst = [float(e.max()) if e.numel() else 0.0 for e in (error, relative)]
    return {"max_abs": worst[0], "max_rel": worst[1], "elements": int((~same).sum())} | out


@ckpt.command()
@_file("a")
@_file("b")
@_command
def diff(a: Path, b: Path, as_json: bool, allow_pickle: bool) -> None:
    """Compares A and B tensor by tensor: largest absolute and relative error. Exit status 1 where they differ."""
    from .. import storage

    states = [dict(_leaves(storage.load(file, allow_pickle=allow_pickle))) for file in (a, b)]
    differences: list[dict[str, Any]] = []
    for path, value in states[0].items():
        found = {"reason": f"only in {a}"} if path not in states[1] else _compare(value, states[1][path])
        if found is not None:
            differences.append({"name": _name(path)} | found)
    only_b = [path for path in states[1] if path not in states[0]]
    differences += [{"name": _name(path), "reason": f"only in {b}"} for path in only_b]
    equal = len(states[0].keys() & states[1].keys()) - sum("only in" not in d.get("reason", "") for d in differences)
    if as_json:
        click.echo(json.dumps({"equal": equal, "differences": differences}))
    else:
        for entry in differences:
            text = [entry["reason"]] if "reason" in entry else []
            if "max_abs" in entry:
                numbers = f"max abs {entry['max_abs']:.3g}, max rel {entry['max_rel']:.3g}"
                text.append(f"{numbers}, {entry['elements']} elements")
            click.echo(f"{entry['name']}: {'; '.join(text)}")
        click.echo(f"{equal} entries are equal, {len(differences)} differ")
    raise SystemExit(1 if differences else 0)


def _plain(obj: Any) -> Any:
    """Containers and tensors that `torch.load(weights_only=True)` knows; memory that is shared stays shared."""
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return tuple(map(_plain, obj))
    if isinstance(obj, dict):
        return type(obj)((key, _plain(value)) for key, value in obj.items())
    if isinstance(obj, (list, tuple)) and type(obj) in (list, tuple):
        return type(obj)(map(_plain, obj))
    return obj


def _flat(state: Any, tensors_only: bool) -> dict[str, Any]:
    import numpy as np
    import torch

    out: dict[str, Any] = {}
    others = []
    for path, value in _leaves(state):
        name = _name(path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            others.append(name)
        elif name in out:
            raise ValueError(f"two tensors would both be called {name!r} in a safetensors file")
        else:
            out[name] = value.clone(memory_format=torch.contiguous_format)
    if others and not tensors_only:
        names = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
        raise ValueError(f"a safetensors file holds tensors only, not {names}. Use --tensors-only to leave these out.")
    return out


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` when the block ends well; an existing file is never replaced."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        raise FileExistsError(f"{path} exists; delete it or choose another name") from None
    finally:
        temporary.unlink(missing_ok=True)


@ckpt.command()
@_file("source")
@_file("target")
@click.option("--to", type=click.Choice(["cstorch", "safetensors", "torch"]), help="By default from TARGET's suffix.")
@click.option("--tensors-only", is_flag=True, help="Leave out what a safetensors file cannot hold.")
@click.option("--compression", type=click.Choice(["lz4", "zstd"]), help="Compress tensors (cstorch only).")
@_command
def convert(
    source: Path, target: Path, to: str | None, tensors_only: bool, compression: str | None, as_json: bool, allow_pickle
) -> None:
    """Converts SOURCE to TARGET: .mdl .h5 .hdf5 .ckpt (cstorch), .safetensors, or .pt .pth .bin (torch).

    A safetensors file is flat: nested keys are joined by dots, and shared tensors are stored separately.
    """
    from .. import storage

    if to is None:
        kinds = {suffix: "cstorch" for suffix in _HDF5} | {suffix: "torch" for suffix in _TORCH}
        to = (kinds | {".safetensors": "safetensors"}).get(target.suffix)
        if to is None:
            raise ValueError(f"the suffix of {target} does not tell its format: use --to")
    if compression and to != "cstorch":
        raise ValueError("--compression is for the cstorch format")
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; delete it or choose another name")
    if to == "cstorch":
        storage.save(storage.load(source, allow_pickle=allow_pickle), target, compression=compression)
    elif to == "safetensors":
        from safetensors.torch import save_file

        tensors = _flat(storage.load(source, allow_pickle=allow_pickle), tensors_only)
        with _written_whole(target) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    else:
        import torch

        state = _plain(storage.load(source, "cpu", allow_pickle=allow_pickle))
        with _written_whole(target) as temporary:
            torch.save(state, temporary)
    if as_json:
        click.echo(json.dumps({"target": str(target), "format": to, "bytes": target.stat().st_size}))
    else:
        click.echo(f"{target}: {to}, {_bytes(target.stat().st_size)}")


def _has_checksum(tensor: Any) -> bool:
    """Whether reading the tensor compared its data, or those it is a part of, with a checksum."""
    cell = getattr(tensor, "_cell", None)
    source = getattr(cell, "source", None)
    base = getattr(source, "base", None)
    source = base.source if base is not None else source
    return hasattr(source, "reader") and source.key in source.reader.checksums


@ckpt.command()
@_file("file")
@_command
def verify(file: Path, as_json: bool, allow_pickle: bool) -> None:
    """Reads everything in FILE and checks what can be checked. Exit status 1 where it is damaged.

    Files of this package have checksums of all data and metadata; of others it can only be told that they can be read.
    Tensors with NaN or infinite values are named, and are no damage.
    """
    import torch

    from cerebras.appliance.storage import MissingFileError, StorageError

    from .. import storage

    problems: list[str] = []
    notes: list[str] = []
    tensors = read = checked = 0
    try:
        state = storage.load(file, allow_pickle=allow_pickle)
        for path, value in _leaves(state):
            if not isinstance(value, torch.Tensor) or isinstance(value, storage.DeferredFullTensor):
                continue
            tensors += 1
            try:
                values = value.clone()
            except StorageError as error:
                problems.append(str(error))
                continue
            read += values.nbytes
            checked += _has_checksum(value)
            if (values.is_floating_point() or values.is_complex()) and values.element_size() > 1:
                bad = int((~values.isfinite()).sum())
                if bad:
                    notes.append(f"{_name(path)}: {bad} values are NaN or infinite")
    except MissingFileError:
        raise
    except StorageError as error:
        problems.append(str(error))
    if as_json:
        result = {"ok": not problems, "tensors": tensors, "checked": checked, "bytes": read}
        click.echo(json.dumps(result | {"problems": problems, "notes": notes}))
    else:
        for line in (*notes, *problems):
            click.echo(line)
        verdict = "damaged" if problems else "well"
        click.echo(f"{file}: {verdict}; {tensors} tensors read ({_bytes(read)}), {checked} compared with a checksum")
    raise SystemExit(1 if problems else 0)
