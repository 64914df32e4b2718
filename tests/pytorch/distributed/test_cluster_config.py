"""ClusterConfig and the old CSConfig: what is refused, and how."""

import dataclasses
import pickle
import subprocess
import sys

import pytest

import cerebras.pytorch.backends as backends
from cerebras.pytorch.distributed import ClusterConfig
from cerebras.pytorch.utils.cs_config import CSConfig


def test_defaults_are_those_of_the_original():
    config = ClusterConfig()
    assert (config.num_csx, config.max_wgt_servers, config.max_act_per_csx, config.num_workers_per_csx) == (1, 0, 0, 1)
    assert config.job_priority == "p2" and config.mgmt_address is None and config.job_time_sec is None


def test_equal_configurations_hash_alike_and_can_be_sent(tmp_path):
    def make():
        return ClusterConfig(
            mgmt_address="head:6379",
            mount_dirs=[str(tmp_path)],
            python_paths=tmp_path,
            job_labels=["team=nlp", "empty="],
            notifications=[{"mailto": ["a@b.c"]}, "x"],
        )

    assert make() == make() and hash(make()) == hash(make())
    assert pickle.loads(pickle.dumps(make())) == make()
    assert make().mount_dirs == make().python_paths == (str(tmp_path),)
    assert dataclasses.replace(make(), num_csx=2).num_csx == 2


@pytest.mark.parametrize("address", ["head:6379", "10.0.0.1:80", "ray://head.example.org:10001", "[::1]:6379"])
def test_addresses(address):
    assert ClusterConfig(mgmt_address=address).mgmt_address == address


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("mgmt_address", "head", ValueError),
        ("mgmt_address", "head:99999", ValueError),
        ("mgmt_address", "", ValueError),
        ("mgmt_address", 80, TypeError),
        ("num_csx", -1, ValueError),
        ("num_csx", True, TypeError),
        ("num_csx", "2", TypeError),
        ("job_time_sec", 0, ValueError),
        ("job_labels", ["team"], ValueError),
        ("job_labels", ["team=a b"], ValueError),
        ("job_labels", {"team": "a"}, TypeError),
        ("job_labels", [3], TypeError),
        ("job_priority", "p4", ValueError),
        ("job_priority", 2, TypeError),
        ("mount_dirs", ["/does/not/exist"], ValueError),
        ("python_paths", ["/does/not/exist"], ValueError),
        ("automount", 1, TypeError),
        ("notifications", 3, TypeError),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(field, value, kind):
    with pytest.raises(kind) as caught:
        ClusterConfig(**{field: value})
    shown = value[0] if isinstance(value, list) and kind is ValueError else value
    assert f"{field}={shown!r}" in str(caught.value) and "use " in str(caught.value)


def test_the_check_of_mounts_can_be_left_out_but_not_that_of_python_paths():
    assert ClusterConfig(mount_dirs=["/does/not/exist"], disable_mount_check=True).mount_dirs == ("/does/not/exist",)
    with pytest.raises(ValueError, match="python_paths"):
        ClusterConfig(python_paths=["/does/not/exist"], disable_mount_check=True)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="num_csxs"):
        ClusterConfig(num_csxs=1)


@pytest.fixture
def default_flags():
    backends.reset()
    yield
    backends.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_configuration_becomes_the_new_and_flags(default_flags, tmp_path):
    backends.csx.precision.optimization_level = 0
    old = CSConfig(num_csx=2, mount_dirs=[str(tmp_path)], transfer_processes=3, debug_args={"a": 1})
    assert backends.csx.performance.transfer_processes == 5
    config = old.to_cluster_config()
    assert config == ClusterConfig(num_csx=2, mount_dirs=[str(tmp_path)], max_wgt_servers=24, max_act_per_csx=1)
    assert backends.csx.performance.transfer_processes == 3
    assert backends.csx.debug.debug_args.as_dict() == {"a": 1}
    assert backends.csx.precision.optimization_level == 0, "a flag that was not given keeps its value"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_configuration_is_checked_where_it_is_written():
    with pytest.raises(ValueError, match="precision_opt_level=3"):
        CSConfig(precision_opt_level=3)
    with pytest.raises(ValueError, match="num_csx=-1"):
        CSConfig(num_csx=-1)


def test_the_old_configuration_is_deprecated_once_a_process_at_the_users_line():
    code = (
        "import warnings\nwarnings.simplefilter('always')\n"
        "from cerebras.pytorch.utils.cs_config import CSConfig\nCSConfig()\nCSConfig()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("DeprecationWarning: cerebras.pytorch.utils.CSConfig") == 1
    assert "<string>:4:" in done.stderr
