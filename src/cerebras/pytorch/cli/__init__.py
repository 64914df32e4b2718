"""The command `cstorch`. Each group of sub-commands is one module of this package."""

import click

from .ckpt import ckpt


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cstorch", message="%(package)s %(version)s")
def main() -> None:
    """Tools for cstorch."""


main.add_command(ckpt)
