"""Classes and their descendants."""

from collections.abc import Callable, Iterator


def retrieve_all_subclasses(cls: type, condition: Callable[[type], bool] | None = None) -> Iterator[type]:
    """Every class below `cls`, each once, parents before children.

    Args:
        cls: the class, which is not among them.
        condition: only yield those that it accepts; the children of others are searched nonetheless.
    """
    seen: set[type] = set()
    waiting = list(cls.__subclasses__())
    while waiting:
        subclass = waiting.pop(0)
        if subclass in seen:
            continue
        seen.add(subclass)
        if condition is None or condition(subclass):
            yield subclass
        waiting.extend(subclass.__subclasses__())
