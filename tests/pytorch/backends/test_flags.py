"""The flag tree: what is assigned is checked, and what is unknown is refused."""

import copy
import importlib
import pickle
import sys

import pytest

import cerebras.pytorch.backends as backends


@pytest.fixture(autouse=True)
def default_flags():
    backends.reset()
    yield
    backends.reset()


def walk(dotted):
    group = backends
    *path, leaf = dotted.split(".")
    for part in path:
        group = getattr(group, part)
    return group, leaf


def test_every_flag_of_the_api_reference_has_its_documented_default():
    defaults = {info.name: info.default for info in backends.flags()}
    assert defaults["csx.precision.optimization_level"] == 1
    assert defaults["csx.performance.micro_batch_size"] == "auto"
    assert defaults["csx.performance.transfer_processes"] == 5
    assert defaults["csx.debug.retrace_every_iteration"] is False
    assert defaults["csx.debug.lazy_initialization"] is True
    assert defaults["csx.debug.log_initialization"] is True
    assert defaults["csx.storage.s3.profile"] is None
    for service in ("compile_crd", "execute_crd", "wrk", "act", "cmd", "wgt", "chf"):
        assert defaults[f"csx.debug.{service}_memory_gi"] is None
    for flag in (
        "performance.max_transfer_bytes",
        "performance.compress_weights",
        "performance.use_speculative_optimizers",
        "debug.debug_args",
        "debug.ini",
        "debug.drop_data",
        "debug.fabric_type_blacklist",
        "cluster.auto_taint",
    ):
        assert f"csx.{flag}" in defaults
    assert all(info.help for info in backends.flags())


@pytest.mark.parametrize("dotted", [info.name for info in backends.flags()])
def test_set_read_and_delete_by_dotted_path_as_the_model_zoo_does(dotted):
    group, leaf = walk(dotted)
    before = getattr(group, leaf)
    setattr(group, leaf, copy.deepcopy(before))
    assert getattr(group, leaf) == before
    delattr(group, leaf)
    assert getattr(group, leaf) == before


@pytest.mark.parametrize(
    ("dotted", "value", "kind"),
    [
        ("csx.precision.optimization_level", 3, ValueError),
        ("csx.precision.optimization_level", -1, ValueError),
        ("csx.precision.optimization_level", True, TypeError),
        ("csx.precision.optimization_level", 1.0, TypeError),
        ("csx.precision.optimization_level", None, TypeError),
        ("csx.performance.transfer_processes", 0, ValueError),
        ("csx.performance.transfer_processes", "5", TypeError),
        ("csx.performance.max_transfer_bytes", 2147482625, ValueError),
        ("csx.performance.compress_weights", 1, TypeError),
        ("csx.performance.micro_batch_size", 0, ValueError),
        ("csx.performance.micro_batch_size", True, TypeError),
        ("csx.performance.micro_batch_size", "best", ValueError),
        ("csx.performance.micro_batch_size", {"explore": {"min": 8, "max": 4}}, ValueError),
        ("csx.performance.micro_batch_size", {"explore": {"min": 0}}, ValueError),
        ("csx.performance.micro_batch_size", {"explore": {"most": 4}}, ValueError),
        ("csx.performance.micro_batch_size", {"explore": 4}, TypeError),
        ("csx.performance.micro_batch_size", {"try": {}}, ValueError),
        ("csx.debug.wrk_memory_gi", 0, ValueError),
        ("csx.debug.drop_data", "no", TypeError),
        ("csx.debug.compiler", "fast", ValueError),
        ("csx.debug.fabric_type_blacklist", [1], TypeError),
        ("csx.debug.ini", 3, TypeError),
        ("csx.debug.ini", {"a": object()}, TypeError),
        ("csx.debug.ini", {"not a name": 1}, ValueError),
        ("csx.storage.s3.profile", 3, TypeError),
        ("csx.storage.s3.profile", "", ValueError),
    ],
)
def test_a_wrong_value_names_flag_value_and_remedy_and_changes_nothing(dotted, value, kind):
    group, leaf = walk(dotted)
    before = getattr(group, leaf)
    with pytest.raises(kind) as caught:
        setattr(group, leaf, value)
    message = str(caught.value)
    assert f"cerebras.pytorch.backends.{dotted}" in message
    assert repr(value)[:12] in message
    assert any(remedy in message for remedy in ("use ", "Use ", "swap them", "is a bool, int, float or str"))
    assert getattr(group, leaf) == before


def test_micro_batch_size_takes_all_documented_forms():
    performance = backends.csx.performance
    for value in ("auto", "explore", 4, None, {"explore": {"min": 2, "max": 8}}, {"explore": {"min": None}}):
        performance.micro_batch_size = value
        assert performance.micro_batch_size == value


def test_changing_a_read_dict_in_place_does_not_pass_the_checks_by():
    backends.csx.performance.micro_batch_size = {"explore": {"min": 2, "max": 8}}
    backends.csx.performance.micro_batch_size["explore"]["min"] = 99
    assert backends.csx.performance.micro_batch_size == {"explore": {"min": 2, "max": 8}}


@pytest.mark.parametrize("act", ["get", "set", "del"])
@pytest.mark.parametrize(
    ("group", "name", "nearest"),
    [
        ("csx.precision", "optimisation_level", "csx.precision.optimization_level"),
        ("csx.debug", "micro_batch_size", "csx.performance.micro_batch_size"),
        ("csx", "performence", "csx.performance."),
    ],
)
def test_a_misspelled_flag_names_the_nearest(act, group, name, nearest):
    node = getattr(*walk(group))
    with pytest.raises(AttributeError, match=nearest.replace(".", r"\.")) as caught:
        {"get": getattr, "set": lambda o, n: setattr(o, n, 1), "del": delattr}[act](node, name)
    assert f"{group}.{name}" in str(caught.value)


def test_the_module_itself_takes_no_new_attributes():
    with pytest.raises(AttributeError, match="micro_batch_size"):
        backends.micro_batch_size = 3
    with pytest.raises(AttributeError, match="group of flags"):
        backends.csx = 3
    with pytest.raises(AttributeError, match="group of flags"):
        backends.csx.debug = 3


def test_importing_the_submodule_does_not_hide_the_flags():
    importlib.import_module("cerebras.pytorch.backends.csx")
    assert sys.modules["cerebras.pytorch.backends"].csx.precision.optimization_level == 1


def test_ini_settings_are_set_and_deleted_as_attributes():
    ini = backends.csx.debug.ini
    assert getattr(ini, "check_nan", None) is None
    ini.check_nan = True
    assert backends.csx.debug.ini.check_nan is True
    assert backends.as_dict()["csx.debug.ini"] == {"check_nan": True}
    del ini.check_nan
    with pytest.raises(AttributeError, match="check_nan is not set"):
        del ini.check_nan
    backends.csx.debug.ini = {"level": 3}
    assert backends.csx.debug.ini.level == 3
    assert copy.deepcopy(backends.csx.debug.ini) == pickle.loads(pickle.dumps(backends.csx.debug.ini))
    del backends.csx.debug.ini
    assert "level" not in backends.csx.debug.ini


def test_the_default_of_ini_is_not_shared_after_reset():
    backends.csx.debug.ini.left_over = 1
    backends.reset()
    assert not len(backends.csx.debug.ini)
    assert [info.default.as_dict() for info in backends.flags() if info.name == "csx.debug.ini"] == [{}]


def test_debug_args_merge_like_a_message():
    args = backends.csx.debug.debug_args
    assert not args
    args.crd.limits.seconds = 3
    args.MergeFrom(backends.DebugArgs(crd={"limits": {"retries": 2}, "labels": ["a"]}))
    args.MergeFrom({"crd": {"labels": ["b"]}})
    assert backends.as_dict()["csx.debug.debug_args"] == {
        "crd": {"limits": {"seconds": 3, "retries": 2}, "labels": ["a", "b"]}
    }
    other = pickle.loads(pickle.dumps(args))
    assert other == args
    other.crd.limits.seconds = 4
    assert args.crd.limits.seconds == 3


def test_reading_debug_args_does_not_create_a_node():
    assert not backends.csx.debug.debug_args.crd.limits
    assert backends.csx.debug.debug_args.as_dict() == {}


def test_report_tells_changed_flags():
    assert backends.as_dict(changed_only=True) == {}
    backends.csx.cluster.auto_taint = True
    assert backends.as_dict(changed_only=True) == {"csx.cluster.auto_taint": True}
    backends.reset()
    assert backends.as_dict(changed_only=True) == {}
