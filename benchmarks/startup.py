"""Import time: `python benchmarks/startup.py [--rounds N] [--json PATH]`.

`import cerebras.pytorch` beyond `import torch`, in fresh processes, interleaved. Budget: 0.15 s. The first step with a
cold and a warm compile_dir is in benchmarks/step.py.
"""

import argparse
import statistics
import subprocess
import sys

from _common import environment, table, write_json

CONTENDERS = {
    "import torch": "",
    "import cerebras.pytorch": "import cerebras.pytorch",
    "import cerebras_pytorch": "import cerebras_pytorch",
}
SCRIPT = """
import time
start = time.perf_counter(); import torch; middle = time.perf_counter()
{}
end = time.perf_counter()
print(middle - start, end - middle)
"""


def measure(rounds: int) -> dict:
    times = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, statement in CONTENDERS.items():
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT.format(statement)], capture_output=True, text=True, check=True
            )
            times[name].append([float(t) for t in done.stdout.split()])
    return {
        name: {
            "torch_s": statistics.median(t for t, _ in values),
            "beyond_torch_s": statistics.median(b for _, b in values),
            "best_beyond_torch_s": min(b for _, b in values),
        }
        for name, values in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    result = {"environment": environment(), "rounds": args.rounds, "imports": measure(args.rounds)}
    rows = [
        [name, *(f"{r[k]:.3f}" for k in ("torch_s", "beyond_torch_s", "best_beyond_torch_s"))]
        for name, r in result["imports"].items()
    ]
    print(table(["", "torch s", "beyond torch s", "best s"], rows))
    write_json(args.json, result)


if __name__ == "__main__":
    main()
