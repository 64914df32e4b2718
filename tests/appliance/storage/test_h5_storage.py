"""The HDF5 reader and writer, without torch."""

import subprocess
import sys

import numpy as np
import pytest

from cerebras.appliance.storage import (
    H5Reader,
    H5Writer,
    S3Reader,
    StorageDeleter,
    StorageError,
    StorageReader,
    StorageWriter,
)


def write(path, **arrays):
    with H5Writer(path) as writer:
        writer.write_attribute("__version__", np.float64(0.5))
        writer.write_attribute("__spec__", "[]")
        for key, array in arrays.items():
            writer.write_metadata(key, {"kind": key})
            writer.write_array(key, array, {"text": "é", "flag": True, "list": ["a", "b"], "n": 3})


def test_arrays_and_attributes(tmp_path):
    arrays = {"f": np.arange(6.0).reshape(2, 3), "b": np.array([True, False]), "s": np.array(3), "e": np.zeros((0, 2))}
    write(tmp_path / "a.mdl", **arrays, t=arrays["f"].T)
    reader = H5Reader(tmp_path / "a.mdl")
    assert reader.keys() == sorted([*arrays, "t"]) and reader.metadata("f") == {"kind": "f"}
    for key, array in arrays.items():
        assert np.array_equal(reader.read(key), array) and reader.info(key).dtype == array.dtype
    assert np.array_equal(reader.read("t"), arrays["f"].T)
    assert np.array_equal(reader.read("f", (1, 2)), arrays["f"][1:2])
    assert reader.info("f").offset % 8 == 0
    assert reader.attribute("f", "text") == "é" and reader.attribute("f", "flag")
    assert list(reader.attribute("f", "list")) == ["a", "b"]
    assert reader.fstat.st_size == (tmp_path / "a.mdl").stat().st_size
    assert reader.global_metadata["__version__"] == 0.5


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(KeyError):
        with H5Writer(tmp_path / "a.mdl") as writer:
            writer.write_array("a", np.ones(3))
            raise KeyError
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_only_when_complete(tmp_path):
    write(tmp_path / "a.mdl", a=np.ones(3))
    with pytest.raises(FileExistsError):
        H5Writer(tmp_path / "a.mdl")
    with H5Writer(tmp_path / "a.mdl", overwrite=True) as writer:
        writer.write_attribute("__version__", 0.5)
        writer.write_metadata("a", {})
        writer.write_array("a", np.zeros(3))
        assert H5Reader(tmp_path / "a.mdl").read("a").sum() == 3
    assert H5Reader(tmp_path / "a.mdl").read("a").sum() == 0


def test_many_entries_and_long_metadata(tmp_path):
    with H5Writer(tmp_path / "a.mdl") as writer:
        writer.write_attribute("__version__", 0.5)
        for index in range(10_000):
            writer.write_metadata(f"layer.{index}", {"text": "x" * 500})
        writer.write_metadata("long", {"text": "y" * 300_000})
    reader = H5Reader(tmp_path / "a.mdl")
    assert len(reader.keys()) == 10_001 and len(reader.metadata("long")["text"]) == 300_000


def test_an_array_whose_name_is_a_group(tmp_path):
    write(tmp_path / "a.mdl", **{"a/b": np.ones(2)})
    reader = H5Reader(tmp_path / "a.mdl")
    assert reader.read("a/b").tolist() == [1, 1]
    for key in ("a", "", "missing", "a/c"):
        with pytest.raises(StorageError):
            reader.read(key)


def test_the_implementation_is_chosen_by_path(tmp_path):
    assert StorageReader.get_type(tmp_path / "a") is H5Reader and StorageReader.get_type("s3://b/a") is S3Reader
    assert not StorageReader.path_exists(tmp_path / "a") and StorageWriter.path_exists(tmp_path)
    assert H5Writer.is_valid_path("x.mdl") and not H5Writer.is_valid_path("s3://b/a")
    with pytest.raises(StorageError, match="not supported"):
        StorageReader.get("s3://b/a")
    write(tmp_path / "a", a=np.ones(1))
    StorageDeleter.get(tmp_path / "a").delete()
    assert not StorageDeleter.path_exists(tmp_path / "a")


def test_importing_is_cheap():
    script = "import sys, cerebras.appliance.storage; print('h5py' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
