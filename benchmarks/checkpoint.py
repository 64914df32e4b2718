"""Checkpoints: this package beside torch.save, safetensors and torch.distributed.checkpoint, in one run.

    python benchmarks/checkpoint.py [--rounds 5] [--tensors 100] [--directory DIR] [--json FILE]

Each operation runs in a fresh process; the operations take turns, so that a slow minute of the machine hits all of them.
The table gives medians (smallest to largest). "load" is the call, and "+ first pass" adds one sum over every tensor: what
maps the file instead of reading it pays there. Peak memory is what the operation adds to the process with the state in
memory (save), or without any (load). "cold" means that the file's pages were dropped from the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, COLUMNS = 1638, 1600


def memory(name="VmHWM"):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def state_of(count):
    import torch

    base = torch.rand(ROWS, COLUMNS)
    return {f"layer.{index}.weight": base + index for index in range(count)}


def drop(path):
    files = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
    for name in files:
        with open(name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def saver(name):
    if name.startswith("cstorch"):
        from cerebras.pytorch import storage

        compression = name.partition(" ")[2]
        options = {"compression": compression} if compression in ("lz4", "zstd") else {}
        return lambda state, path: storage.save(state, path, **options)
    if name == "torch":
        import torch

        return torch.save
    if name == "safetensors":
        from safetensors.torch import save_file

        return save_file
    from torch.distributed import checkpoint

    return lambda state, path: checkpoint.save(state, checkpoint_id=path, no_dist=True)


def loader(name, count):
    import torch

    if name.startswith("cstorch"):
        from cerebras.pytorch import storage

        return lambda path: storage.load(path, "cpu", mmap=name.endswith("mmap"))
    if name == "torch":
        return torch.load
    if name == "safetensors":
        from safetensors.torch import load_file

        return load_file
    from torch.distributed import checkpoint

    def load(path):
        state = {f"layer.{index}.weight": torch.empty(ROWS, COLUMNS) for index in range(count)}
        checkpoint.load(state, checkpoint_id=path, no_dist=True)
        return state

    return load


def child_save(name, path, count):
    """Seconds of a save as it is, and with fsync switched off or added, and the peak memory it adds."""
    save, small = saver(name), state_of(1)
    save(small, path + ".warm")
    state = state_of(count)
    own = name.startswith("cstorch")
    if name == "cstorch, no fsync":
        os.fsync = lambda fd: None
    reset_peak()
    before, start = memory(), time.perf_counter()
    save(state, path)
    saved = time.perf_counter() - start
    peak = memory() - before
    if not own:
        files = [os.path.join(path, f) for f in os.listdir(path)] if os.path.isdir(path) else [path]
        for file in files:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    return {"seconds": saved, "with fsync": None if "," in name else time.perf_counter() - start, "peak MB": peak}


def child_load(name, path, count, cold):
    import torch

    load = loader(name, count)
    torch.ones(10).sum()
    if name != "dcp":
        load(path + ".warm")
    if cold:
        drop(path)
    reset_peak()
    before, start = memory(), time.perf_counter()
    state = load(path)
    called = time.perf_counter() - start
    for tensor in state.values():
        tensor.sum()
    return {"seconds": called, "+ first pass": time.perf_counter() - start, "peak MB": memory() - before}


def child_lazy(name, path, count, cold):
    if name == "cstorch":
        from cerebras.pytorch import storage

        def opener(path):
            state = storage.load(path)
            return lambda key: state[key]
    else:
        from safetensors import safe_open

        def opener(path):
            return safe_open(path, "pt").get_tensor

    opener(path + ".warm")("layer.0.weight").sum()
    if cold:
        drop(path)
    reset_peak()
    before, read, start = memory(), bytes_read(), time.perf_counter()
    get = opener(path)
    opened = time.perf_counter() - start
    value = get("layer.1.weight")[0, :10].sum()
    first = time.perf_counter() - start
    del value
    get("layer.1.weight").sum()
    whole = time.perf_counter() - start
    tensor_bytes = bytes_read() - read
    for index in range(count):
        get(f"layer.{index}.weight").sum()
    return {
        "open ms": opened * 1e3,
        "first values ms": first * 1e3,
        "first whole tensor ms": whole * 1e3,
        "MB read for it": tensor_bytes / 1e6,
        "peak MB of all, one by one": memory() - before,
    }


def child_background(path, count):
    from cerebras.pytorch import storage
    from cerebras.pytorch.storage import background

    state = state_of(count)
    out, start = {}, time.perf_counter()
    storage.save(state, path)
    out["synchronous s"] = time.perf_counter() - start
    for turn in ("first", "later", "later"):
        os.unlink(path)
        start = time.perf_counter()
        storage.save(state, path, background=True)
        out[f"stop s, {turn}"] = time.perf_counter() - start
        background._saver.join()
    storage.wait_for_saves()
    return out


def child(arguments):
    kind, name, path, count, cold = json.loads(arguments)
    if kind == "save":
        out = child_save(name, path, count)
    elif kind == "load":
        out = child_load(name, path, count, cold)
    elif kind == "lazy":
        out = child_lazy(name, path, count, cold)
    else:
        out = child_background(path, count)
    print(json.dumps(out))


def run(kind, name, path, count, cold=False):
    command = [sys.executable, __file__, "--child", json.dumps([kind, name, path, count, cold])]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{kind} {name}: {result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def remove(path):
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path) if os.path.exists(path) else None


SAVERS = ("cstorch", "cstorch, no fsync", "safetensors", "torch", "dcp", "cstorch lz4")
LOADERS = ("cstorch", "cstorch mmap", "safetensors", "torch", "dcp")


def measure(rounds, count, directory):
    results = {}

    def note(kind, name, values):
        for key, value in values.items():
            results.setdefault(kind, {}).setdefault(name, {}).setdefault(key, []).append(value)

    def path_of(name):
        return os.path.join(directory, name.replace(" ", "").replace(",", "-"))

    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        shift = turn % len(SAVERS)
        for name in SAVERS[shift:] + SAVERS[:shift]:
            for suffix in ("", ".warm"):
                remove(path_of(name) + suffix)
            note("save", name, run("save", name, path_of(name), count))
            if name not in LOADERS:
                remove(path_of(name))
        shift = turn % len(LOADERS)
        for cold in (False, True):
            for name in LOADERS[shift:] + LOADERS[:shift]:
                note(
                    "load, cold" if cold else "load",
                    name,
                    run("load", name, path_of(name.removesuffix(" mmap")), count, cold),
                )
            for name in ("cstorch", "safetensors"):
                note("lazy, cold" if cold else "lazy", name, run("lazy", name, path_of(name), count, cold))
        remove(path_of("cstorch"))
        note("background writing", "cstorch", run("background", "cstorch", path_of("cstorch"), count))
        remove(path_of("cstorch"))
    return results


def table(rows):
    columns = list(dict.fromkeys(key for values in rows.values() for key in values))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, values in rows.items():
        cells = []
        for column in columns:
            numbers = [number for number in values.get(column, []) if number is not None]
            digits = 0 if "peak" in column else 1 if "ms" in column else 2
            cells.append(
                f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f}-{max(numbers):.{digits}f})"
                if numbers
                else "-"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--directory", help="on the file system to measure; a temporary one in the working directory")
    parser.add_argument("--json", help="also write every figure there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    directory = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.directory or ".")
    try:
        results = measure(options.rounds, options.tensors, directory)
    finally:
        shutil.rmtree(directory)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"tensors": options.tensors, "rounds": options.rounds, "results": results}, file, indent=1)
    gigabytes = options.tensors * ROWS * COLUMNS * 4 / 1e9
    print(f"{gigabytes:.2f} GB in {options.tensors} float32 tensors; medians of {options.rounds} rounds (min-max)")
    for kind, rows in results.items():
        print(f"\n### {kind}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
