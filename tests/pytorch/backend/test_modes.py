"""validate_only and compile_only: one iteration, no values, no cluster, a report, and an exit code that tells."""

import json

import pytest
import torch
import torch.nn as nn

import cerebras.pytorch as cstorch

SCRIPT = """
    import resource, sys
    import torch, torch.nn as nn
    import cerebras.pytorch as cstorch

    modes, width, body = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    backend = cstorch.backend("CSX", artifact_dir="artifacts", compile_dir="cache", **{m: True for m in modes})
    with backend.device:
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)

    @cstorch.trace
    def training_step(batch):
        x, y = batch
        loss = nn.functional.cross_entropy(compiled(x), y)
        if body == "reads":
            print(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @cstorch.step_closure
    def log(loss):
        print("a closure ran")

    @cstorch.checkpoint_closure
    def save():
        print("a checkpoint closure ran")

    def batches():
        yield torch.randn(8, 64), torch.randint(0, 10, (8,))
        print("a second batch was asked for")

    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=50, checkpoint_steps=1)
    for batch in executor:
        if body == "untraced":
            continue
        log(training_step(batch))
        save()
        if body == "breaks":
            break
    if body == "saves":
        cstorch.save(model.state_dict(), "checkpoint_1.mdl")
    print("steps:", executor.num_steps)
    print("peak MB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def report_in(tmp_path, name="report.json"):
    return json.loads((tmp_path / "artifacts" / name).read_text())


def peak(done):
    return int(done.stdout.split("peak MB:")[1].split()[0])


def test_a_model_larger_than_the_machine_is_validated_in_little_memory(run_script, tmp_path):
    done = run_script(SCRIPT, "validate_only", 100_000, "trains")
    assert peak(done) < 1500
    report = report_in(tmp_path)
    assert report["parameters"] == 64 * 100_000 + 100_000**2 + 10 * 100_000 + 2 * 100_000 + 10
    assert report["state_bytes"] >= 3 * 4 * report["parameters"], "weights and two moments"
    assert report["mode"] == "validate_only" and report["compile"] is None
    assert f"{report['parameters']:,}" in done.stdout
    assert "'training_step' was validated without errors" in done.stdout
    assert "closure ran" not in done.stdout and "second batch" not in done.stdout
    assert "steps: 1" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_the_report_counts_what_the_step_does(run_script, tmp_path):
    done = run_script(SCRIPT, "validate_only", 32, "trains")
    report = report_in(tmp_path)
    weights, biases = 64 * 32 + 32 * 32 + 32 * 10, 32 + 32 + 10
    assert report["parameters"] == weights + biases
    # weights, moments, and the two step counts of each parameter are state at most
    assert 0 <= report["state_bytes"] - 3 * 4 * (weights + biases) <= 2 * 8 * 6
    # forward, gradient of weights, and gradient of activations, which the first layer does not need
    assert report["flops"] == 2 * 8 * (3 * weights - 64 * 32)
    assert report["operations"]["addmm.default"] == 3
    assert report["batch"] == ["batch[0]: float32[8, 64]", "batch[1]: int64[8]"]
    assert report["batch_bytes"] == 8 * 64 * 4 + 8 * 8
    assert report["outputs"] == ["output_0: float32[]"]
    assert report["unused_parameters"] == []
    in_executor = json.loads((tmp_path / "artifacts/executors/latest/report.json").read_text())
    assert in_executor == report
    for words in ("FLOPs of a step", "t.default x14", "batch[0]: float32[8, 64]", "activation"):
        assert words in done.stdout


def test_the_largest_activations_are_of_the_forward_pass_and_say_where(run_script, tmp_path):
    run_script(SCRIPT, "validate_only", 32, "trains")
    largest = report_in(tmp_path)["largest_activations"]
    assert [a["shape"] for a in largest[:4]] == [[8, 32]] * 4, "not the weights' gradients, not transposed weights"
    assert {a["operation"] for a in largest[:4]} == {"addmm.default", "relu.default"}
    assert {a["module"] for a in largest[:4]} == {"0", "1", "2", "3"}
    assert largest[0]["bytes"] == 8 * 32 * 4
    assert all(":16" in a["at"] for a in largest[:4]), "the line that calls the model"


def test_compile_only_compiles_and_runs_nothing(run_script, tmp_path):
    done = run_script(SCRIPT, "compile_only", 100_000, "trains")
    assert peak(done) < 1500
    report = report_in(tmp_path)
    assert report["mode"] == "compile_only" and report["compile"]["cached"] is False
    assert (tmp_path / "cache").is_dir() and "compilation" in done.stdout
    assert "'training_step' was compiled without errors" in done.stdout
    assert "closure ran" not in done.stdout
    again = run_script(SCRIPT, "compile_only", 100_000, "trains")
    assert "from the cache" in again.stdout and report_in(tmp_path)["compile"]["cached"] is True


def test_both_flags_together_validate(run_script, tmp_path):
    done = run_script(SCRIPT, "compile_only,validate_only", 32, "trains")
    assert "was validated without errors" in done.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mode", ["validate_only", "compile_only"])
def test_a_step_that_cannot_be_captured_fails_the_process_and_says_why(run_script, tmp_path, mode):
    done = run_script(SCRIPT, mode, 32, "reads", check=False)
    assert done.returncode == 1
    assert "TensorReadError" in done.stderr and "script.py:18" in done.stderr and "step_closure" in done.stderr
    assert "without errors" not in done.stdout
    error = report_in(tmp_path)["error"]
    assert error["type"] == "TensorReadError" and error["at"].endswith("script.py:18")


def test_a_loop_that_traces_nothing_fails(run_script):
    done = run_script(SCRIPT, "validate_only", 32, "untraced", check=False)
    assert done.returncode == 1 and "Nothing was validated" in done.stderr and "@cstorch.trace" in done.stderr


def test_leaving_the_loop_early_still_reports(run_script, tmp_path):
    done = run_script(SCRIPT, "validate_only", 32, "breaks")
    assert "was validated without errors" in done.stdout and report_in(tmp_path)["parameters"] > 0


def test_there_is_nothing_to_save(run_script, tmp_path):
    done = run_script(SCRIPT, "validate_only", 32, "saves", check=False)
    assert done.returncode == 1
    assert "holds no data" in done.stderr and "validate_only" in done.stderr and "0.weight" in done.stderr
    assert not list(tmp_path.glob("checkpoint_1*"))


def loop(step):
    for x in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(lambda: [torch.ones(4, 3)])):
        step(x)


def step_of(model, backend):
    compiled = cstorch.compile(model, backend)

    @cstorch.trace
    def forward(x):
        return compiled(x).sum()

    return forward


def test_several_programs_are_reported_once_each(capsys, tmp_path):
    backend = cstorch.backend("CSX", artifact_dir=tmp_path / "a", validate_only=True)
    with backend.device:
        first, second = nn.Linear(3, 2), nn.Linear(3, 5)
    steps = [step_of(first, backend), step_of(second, backend)]
    for step in (*steps, *steps):
        loop(step)
    out = capsys.readouterr().out
    assert out.count("was validated without errors") == 2
    reports = [json.loads((tmp_path / "a" / name).read_text()) for name in ("report.json", "report_2.json")]
    assert [r["parameters"] for r in reports] == [3 * 2 + 2, 3 * 5 + 5], "each counts its own module"


def test_a_parameter_that_the_step_does_not_use_is_named(capsys, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.forgotten = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)

        def forward(self, x):
            return self.used(x)

    backend = cstorch.backend("CSX", artifact_dir=tmp_path / "a", validate_only=True)
    loop(step_of(Model(), backend))
    assert "unused parameters    forgotten.weight" in capsys.readouterr().out
    assert backend.reports[0].as_dict()["unused_parameters"] == ["forgotten.weight"]


def test_num_steps_is_not_needed_without_a_length(tmp_path):
    backend = cstorch.backend("CSX", artifact_dir=tmp_path / "a", validate_only=True)
    loader = cstorch.utils.data.DataLoader(lambda: iter([torch.ones(2, 3)]))
    executor = cstorch.utils.data.DataExecutor(loader)
    assert executor.num_steps == 1
    assert backend.is_e2e_execution is False
    with pytest.raises(ValueError, match="num_steps"):
        cstorch.utils.data.DataExecutor(loader, num_steps=0)
