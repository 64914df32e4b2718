"""Units, links and subclasses."""

import pytest

from cerebras.appliance.utils.classes import retrieve_all_subclasses
from cerebras.appliance.utils.file import create_symlink
from cerebras.appliance.utils.units import bytes_to_human, convert_byte_unit


@pytest.mark.parametrize(
    ("num", "options", "text"),
    [
        (0, {}, "0.0B"),
        (1023, {}, "1023.0B"),
        (1024, {}, "1.0KiB"),
        (-1536, {}, "-1.5KiB"),
        (3 * 1024**3, {}, "3.0GiB"),
        (5 * 1024**7, {}, "5120.0EiB"),
        (1000, {"log_base": 10}, "1.0KB"),
        (2_500_000, {"log_base": 10, "fmt": "{value:.2f} {unit}"}, "2.50 MB"),
    ],
)
def test_bytes_for_people(num, options, text):
    assert bytes_to_human(num, **options) == text


def test_conversion_between_units():
    assert convert_byte_unit(10, "B", src_unit="GB") == 10**10
    assert convert_byte_unit(1, "b", src_unit="gib") == 1024**3
    assert convert_byte_unit(1536, "KiB", precision=1) == 1.5
    assert isinstance(convert_byte_unit(1536, "KiB"), int)
    assert convert_byte_unit(2**60 + 1, "B") == 2**60 + 1
    with pytest.raises(ValueError, match="'XB' is not a unit"):
        convert_byte_unit(1, "XB")
    with pytest.raises(ValueError, match="log_base=3"):
        bytes_to_human(1, log_base=3)


def test_a_link_is_replaced_but_a_file_is_not(tmp_path):
    link = tmp_path / "latest"
    create_symlink(link, "one")
    create_symlink(link, "two", target_is_directory=True)
    assert link.readlink().name == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(FileExistsError, match="Move it away"):
        create_symlink(file, "one")
    assert file.read_text() == "kept"


def test_every_subclass_comes_once_even_in_a_diamond():
    class Root: ...

    class Left(Root): ...

    class Right(Root): ...

    class Bottom(Left, Right): ...

    assert list(retrieve_all_subclasses(Root)) == [Left, Right, Bottom]
    assert list(retrieve_all_subclasses(Root, lambda cls: cls is Bottom)) == [Bottom]
