"""Scripts in processes of their own: what a user runs, with its exit code, its output and its peak memory."""

import os
import subprocess
import sys
import textwrap

import pytest


class Finished(subprocess.CompletedProcess):
    """A finished script. `text` is stdout and stderr together."""

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


@pytest.fixture
def run_script(tmp_path):
    """`run_script(source, *args, launcher=(), **environment)` runs a script in the test's directory."""

    def run(source, *args, launcher=(), check=True, timeout=240, **environment):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        env = {k: v for k, v in (os.environ | {"OMP_NUM_THREADS": "1"} | environment).items() if v is not None}
        done = subprocess.run(
            [sys.executable, *launcher, str(path), *map(str, args)],
            capture_output=True, text=True, cwd=tmp_path, env=env, timeout=timeout,
        )  # fmt: skip
        done = Finished(done.args, done.returncode, done.stdout, done.stderr)
        if check:
            assert done.returncode == 0, done.text
        return done

    return run
