"""Loggers, levels and the classes of failures."""

import logging
import subprocess
import sys

import pytest

from cerebras import appliance
from cerebras.appliance import errors, log


def test_a_level_is_found_by_name_in_any_case_and_by_number():
    assert log.get_level_name("error") == logging.ERROR
    assert log.get_level_name("VERBOSE") == log.VERBOSE
    assert log.get_level_name("15") == log.get_level_name(15) == 15
    with pytest.raises(ValueError, match="'loud' is not a logging level. Use one of"):
        log.get_level_name("loud")
    with pytest.raises(TypeError, match="NoneType"):
        log.get_level_name(None)


def test_a_class_gets_a_logger_of_its_name():
    @log.named_class_logger("Special")
    class One(log.ClassLogger):
        pass

    @log.named_class_logger
    class Two(log.ClassLogger):
        pass

    class Three(log.ClassLogger):
        pass

    assert One().logger is log.named_logger("Special") and One.logger.name == "cerebras.appliance.Special"
    assert Two().logger.name == "cerebras.appliance.Two"
    assert Three().logger is appliance.logger is log.logger
    with pytest.raises(TypeError, match="int"):
        log.named_class_logger(3)


def test_levels_of_services_are_collected_from_general_to_specific():
    names = ("", "execute", "execute.wrk", "act.some.tag", "execute.wrk.io")
    loggers = [log.wsc_logger.getChild(name) if name else log.wsc_logger for name in names]
    try:
        for level, service in enumerate(loggers, start=10):
            service.setLevel(level)
        log.wsc_logger.getChild("compile")
        found = log.collect_wsc_log_settings()
    finally:
        for service in loggers:
            service.setLevel(logging.NOTSET)
    assert found[0] == log.WscLogSetting(10)
    assert set(found) == {
        log.WscLogSetting(10),
        log.WscLogSetting(11, "execute"),
        log.WscLogSetting(12, "execute", "wrk"),
        log.WscLogSetting(13, None, "act", "some.tag"),
        log.WscLogSetting(14, "execute", "wrk", "io"),
    }
    order = [setting.level for setting in found]
    assert order.index(11) < order.index(12) < order.index(14)
    assert log.collect_wsc_log_settings() == []


def test_every_failure_is_an_appliance_error():
    for name in (
        "ApplianceNanError",
        "ApplianceCompilationError",
        "ApplianceDeadlockError",
        "ApplianceUnknownError",
        "ClusterJobCancelledByCsctl",
    ):
        assert issubclass(getattr(errors, name), errors.ApplianceError)


def test_the_engine_does_not_import_torch():
    code = "import sys, cerebras.appliance, cerebras.appliance.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
