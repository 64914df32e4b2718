"""Time of a training step, side by side: `python benchmarks/step.py [--cases mlp,gpt64] [--rounds N] [--json PATH]`.

Contenders: a plain eager loop with a fused optimizer, torch.compile(model) with the eager optimizer,
torch.compile(model) with torch.compile(optimizer.step), and cstorch on its CPU and CSX backends. Each reads its loss at
every step; the time of a step is the time between two iterations of its loop, with everything in it.

Notes:
1. Every contender lives in a process of its own and is stopped between its turns: rounds are interleaved, so a busy
   machine slows all of them, and memory is each one's own.
2. The first step is timed from the model's construction, in a fresh process, with an empty and with a filled cache.
3. Ratios are medians over rounds of (best rival / CSX) within a round.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import CASES, environment, table, write_json

RIVALS = ("eager", "compile", "compile2")
CONTENDERS = (*RIVALS, "CPU", "CSX")
LABELS = {
    "eager": "eager, fused AdamW",
    "compile": "torch.compile(model)",
    "compile2": "torch.compile(model, step)",
    "CPU": "cstorch CPU",
    "CSX": "cstorch CSX",
}
WARMUP = 5


class Turns:
    """In a contender's process: stamps the iterations and waits for its turn (a number of steps on stdin)."""

    def __init__(self, built: float):
        self.left, self.times, self.last, self.first = 0, [], None, built
        self.instrument = lambda: None
        self.timed = []
        self.profiler = None

    def stamp(self) -> None:
        now = time.perf_counter()
        if self.first is not None:
            self._say({"first_step": now - self.first})
            self.first = None
        else:
            self.times.append(now - self.last)
            self.left -= 1
        if self.left <= 0:
            if self.profiler is not None:
                self.profiler.__exit__(None, None, None)
                self._say({"peak_tensors_mib": peak_allocated(self.profiler)})
                self.profiler = None
            elif self.times:
                self._say({"times": self.times[WARMUP:], "calls": self.timed[WARMUP:]})
            self._wait()
        self.last = time.perf_counter()

    def _wait(self):
        line = sys.stdin.readline().strip()
        if not line or line == "quit":
            self._say(memory())
            os._exit(0)
        if line == "instrument":
            self.instrument()
            return self._wait()
        self.times.clear()
        self.timed.clear()
        if line == "profile":
            import torch

            self.left = 1
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self.profiler.__enter__()
            return
        self.left = int(line) + WARMUP

    def _say(self, message):
        print(json.dumps(message), flush=True)


def peak_allocated(profiler) -> float:
    """The most that tensors held at once during the profiled step beyond what they held before it, in MiB."""
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 2**20


def memory() -> dict:
    """Peak resident memory of this process in MiB."""
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run_rival(case: str, kind: str, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    _, make, data, loss_of = CASES[case]
    torch.manual_seed(0)
    batch = data()
    turns = Turns(time.perf_counter())
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **({"fused": True} if kind == "eager" else {}))
    forward = model if kind == "eager" else torch.compile(model)
    step = torch.compile(optimizer.step) if kind == "compile2" else optimizer.step
    losses = []
    for *inputs, target in itertools.repeat(batch):
        optimizer.zero_grad()
        loss = loss_of(forward(*inputs), target)
        loss.backward()
        step()
        losses[:] = [loss.item()]
        turns.stamp()


def run_ours(case: str, kind: str, threads: int, directory: str) -> None:
    import torch

    import cerebras.pytorch as cstorch

    torch.set_num_threads(threads)
    _, make, data, loss_of = CASES[case]
    torch.manual_seed(0)
    batch = data()
    turns = Turns(time.perf_counter())
    options = {"compile_dir": directory} if kind == "CSX" else {}
    backend = cstorch.backend(kind, artifact_dir=os.path.join(directory, "artifacts"), **options)
    with backend.device:
        model = make()
    compiled = cstorch.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **({"fused": True} if kind == "CPU" else {}))
    losses = []

    @cstorch.trace
    def step(batch):
        *inputs, target = batch
        optimizer.zero_grad()
        loss = loss_of(compiled(*inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def read(loss):
        losses[:] = [loss.item()]
        turns.stamp()  # closures run at the end of the step

    def instrument():
        # the only look behind the public API: how long the compiled call itself takes
        for runners in backend.steps.values():
            for runner in runners.values():
                result = runner.step.compiled
                call = result.call

                def timed(inputs, call=call):
                    start = time.perf_counter()
                    out = call(inputs)
                    turns.timed.append(time.perf_counter() - start)
                    return out

                result.call = timed

    turns.instrument = instrument
    loader = cstorch.utils.data.DataLoader(lambda: itertools.repeat(batch))
    for batch_now in cstorch.utils.data.DataExecutor(loader, num_steps=10**9):
        read(step(batch_now))


class Contender:
    """In the parent: one contender's process."""

    def __init__(self, case, kind, threads, cache):
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "inductor"), "TQDM_DISABLE": "1"}
        command = [sys.executable, __file__, "--worker", case, kind, str(threads), cache]
        self.errors = open(os.path.join(cache, "stderr.txt"), "a")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environ
        )
        self.name = f"{case}/{kind}"
        self.first_step = self._hear()["first_step"]

    def _hear(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        tail = Path(self.errors.name).read_text()[-3000:]
        raise RuntimeError(f"the contender {self.name} ended with status {self.process.wait()}:\n{tail}")

    def _tell(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def turn(self, steps: int) -> dict:
        self._tell(str(steps))
        return self._hear()

    def instrument(self):
        self._tell("instrument")

    def profile(self) -> dict:
        self._tell("profile")
        return self._hear()

    def quit(self) -> dict:
        self._tell("quit")
        result = self._hear()
        self.process.wait()
        return result


def measure(case: str, kinds, rounds: int, threads: int) -> dict:
    """One case: {contender: figures}."""
    with tempfile.TemporaryDirectory() as scratch:
        out, running = {}, {}
        for kind in kinds:
            cache = os.path.join(scratch, kind)
            os.makedirs(cache)
            cold = Contender(case, kind, threads, cache)
            out[kind] = {"first_step_cold_s": cold.first_step}
            cold.quit()
        for kind in kinds:
            running[kind] = Contender(case, kind, threads, os.path.join(scratch, kind))
            out[kind]["first_step_warm_s"] = running[kind].first_step
        once = {k: statistics.median(c.turn(5)["times"]) for k, c in running.items()}
        steps = max(8, min(300, int(0.4 / max(once.values()))))
        medians = {k: [] for k in kinds}
        for number in range(rounds):
            order = kinds if number % 2 == 0 else kinds[::-1]
            for kind in order:
                medians[kind].append(statistics.median(running[kind].turn(steps)["times"]))
        for kind in kinds:
            out[kind]["round_medians_ms"] = [round(t * 1e3, 4) for t in medians[kind]]
            out[kind]["step_ms"] = statistics.median(medians[kind]) * 1e3
        if "CSX" in kinds:
            running["CSX"].instrument()
            turn = running["CSX"].turn(steps)
            over = [t - c for t, c in zip(turn["times"], turn["calls"])]
            out["CSX"]["beyond_the_call_us"] = statistics.median(over) * 1e6
        if {"CPU", "eager"} <= set(kinds):
            over = [a - b for a, b in zip(medians["CPU"], medians["eager"])]
            out["CPU"]["beyond_a_plain_loop_us"] = statistics.median(over) * 1e6
        for kind in kinds:
            out[kind] |= running[kind].profile()
            out[kind] |= running[kind].quit()
        rivals = [k for k in kinds if k in RIVALS]
        if rivals:
            for kind in set(kinds) - set(RIVALS):
                ratios = [min(medians[r][i] for r in rivals) / medians[kind][i] for i in range(rounds)]
                out[kind]["best_rival_ratio"] = statistics.median(ratios)
        return out


def report(case: str, result: dict) -> str:
    rows = []
    for kind, r in result.items():
        over = r.get("beyond_the_call_us", r.get("beyond_a_plain_loop_us"))
        rows.append([
            LABELS[kind], f"{r['step_ms']:.3f}",
            f"{r['best_rival_ratio']:.2f}x" if "best_rival_ratio" in r else "",
            f"{r['first_step_cold_s']:.2f}", f"{r['first_step_warm_s']:.2f}", f"{r['peak_tensors_mib']:.2f}", f"{r['peak_mib']:.0f}",
            f"{over:.0f}" if over is not None else "",
        ])  # fmt: skip
    head = [
        "contender",
        "step ms",
        "best rival /",
        "first cold s",
        "first warm s",
        "step's tensors MiB",
        "peak RSS MiB",
        "added us",
    ]
    return f"\n{case}: {CASES[case][0]}\n{table(head, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="write all figures here")
    args = parser.parse_args()
    cases, kinds = args.cases.split(","), tuple(args.contenders.split(","))
    for name, known in [(c, CASES) for c in cases] + [(k, CONTENDERS) for k in kinds]:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    result = {"environment": environment(), "threads": args.threads, "rounds": args.rounds, "cases": {}}
    print(json.dumps(result["environment"]), flush=True)
    for case in cases:
        result["cases"][case] = measure(case, kinds, args.rounds, args.threads)
        print(report(case, result["cases"][case]), flush=True)
        write_json(args.json, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, contender, count, folder = sys.argv[2:]
        if contender in RIVALS:
            run_rival(name, contender, int(count))
        else:
            run_ours(name, contender, int(count), folder)
    else:
        main()
