"""The directive `command`: the options of a command, from its own parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from docutils import nodes
from fields import ALL
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_NOT_SHOWN = ("help", "print_config", "run_config")


def parsers_of(main: Callable[[list[str]], Any]) -> list[argparse.ArgumentParser]:
    """Returns the parsers that print their help when a command is called with `--help`."""
    parsers: list[argparse.ArgumentParser] = []
    with (
        patch.object(argparse.ArgumentParser, "print_help", lambda parser, file=None: parsers.append(parser)),
        suppress(SystemExit),
    ):
        main(["--help"])
    return parsers


class Command(SphinxDirective):
    """The description and the options of the command that is named.

    Options that are fields of a section are on a page of their own.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See `Directive.run`."""
        parsers = parsers_of(importlib.import_module(f"ray_app.cli.{self.arguments[0]}").main)
        about = " ".join(parser.description for parser in parsers if parser.description)
        options = nodes.definition_list(classes=["fields"])
        for action in (action for parser in parsers for action in parser._actions):
            if (
                action.help != argparse.SUPPRESS
                and action.dest.split(".")[0] not in ALL
                and not action.dest.endswith(_NOT_SHOWN)
            ):
                term = nodes.term("", "", nodes.literal("", " ".join(_called(action))))
                description = self.parse_text_to_nodes((action.help or "").replace("%%", "%"))
                options += nodes.definition_list_item("", term, nodes.definition("", *description))
        return [*self.parse_text_to_nodes(about), options]


def _called(action: argparse.Action) -> Iterator[str]:
    yield action.option_strings[0] if action.option_strings else action.dest
    if action.nargs != 0:
        yield str(action.metavar or action.dest.rpartition(".")[2].upper())


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
