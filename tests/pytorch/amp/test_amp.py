"""The settings of mixed precision, and autocast on a CPU."""

import warnings

import pytest
import torch

from cerebras.pytorch import amp
from cerebras.pytorch.amp import _state


@pytest.fixture(autouse=True)
def fresh_settings():
    saved, warned = (_state._state.half_dtype, _state._state.mixed_precision), set(_state._warned)
    _state._state.half_dtype, _state._state.mixed_precision = torch.float16, False
    _state._warned.clear()
    yield
    _state._state.half_dtype, _state._state.mixed_precision = saved
    _state._warned.clear()
    _state._warned.update(warned)


@pytest.mark.parametrize(
    "value, dtype, name",
    [
        ("float16", torch.float16, "float16"),
        ("bfloat16", torch.bfloat16, "bfloat16"),
        (torch.bfloat16, torch.bfloat16, "bfloat16"),
    ],
)
def test_half_dtype(value, dtype, name):
    assert amp.get_half_dtype() == torch.float16
    assert amp.set_half_dtype(value) == dtype
    assert (amp.get_half_dtype(), amp.get_half_dtype_str()) == (dtype, name)


def test_cbfloat16_becomes_bfloat16_with_one_warning():
    with pytest.warns(UserWarning, match="bfloat16 is used in its place"):
        assert amp.set_half_dtype("cbfloat16") == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.set_half_dtype("cbfloat16")
    assert amp.get_half_dtype_str() == "bfloat16"
    assert not amp.is_cbfloat16_tensor(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", ["foo", "FLOAT16", torch.float32, None, 16])
def test_other_types_are_refused(value):
    with pytest.raises(ValueError, match="is not a half precision type"):
        amp.set_half_dtype(value)


def test_floating_point_dtype_depends_on_mixed_precision():
    amp.set_half_dtype("bfloat16")
    assert not amp.mixed_precision()
    assert (amp.get_floating_point_dtype(), amp.get_floating_point_dtype_str()) == (torch.float32, "float32")
    assert amp.get_floating_point_dtype(torch.float64) == torch.float64
    assert amp.enable_mixed_precision() is True
    assert amp.mixed_precision()
    assert (amp.get_floating_point_dtype(), amp.get_floating_point_dtype_str()) == (torch.bfloat16, "bfloat16")
    assert amp.enable_mixed_precision(False) is False


def product_dtype():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_autocast_on_a_cpu():
    assert product_dtype() == torch.float32
    with pytest.warns(UserWarning, match="uses bfloat16 in place of float16"):
        with amp.autocast():
            assert product_dtype() == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.autocast(torch.float16):
            assert product_dtype() == torch.bfloat16
        with amp.autocast(dtype=torch.bfloat16):
            assert product_dtype() == torch.bfloat16
            with amp.disable_casts():
                assert product_dtype() == torch.float32
            assert product_dtype() == torch.bfloat16
    assert product_dtype() == torch.float32
