"""The directive `fields`: every field of a section of the configuration, from its dataclass and docstring."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ray_app.cli.drill import DrillSection
from ray_app.config.config import SECTIONS
from ray_app.config.rules import field_types
from ray_app.predict.predict import PredictSection
from ray_app.retrain.options import RetrainSection
from ray_app.submit.options import SubmitSection
from ray_app.tune.options import StudyBudget, StudyScheduler, TuneSection

PAGE = "reference/configuration"
ALL: dict[str, type] = SECTIONS | {
    "drill": DrillSection,
    "predict": PredictSection,
    "retrain": RetrainSection,
    "submit": SubmitSection,
    "tune": TuneSection,
    "tune.budget": StudyBudget,
    "tune.scheduler": StudyScheduler,
}
_WORDS = {
    Any: "any value",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    types.NoneType: "nothing",
}


def anchor(section: str, field: str) -> str:
    """The id of a field on its page."""
    return f"{section}-{field}".replace("_", "-").replace(".", "-")


def kind(hint: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return ", or ".join(kind(part) for part in parts if part is not types.NoneType)
    if dataclasses.is_dataclass(hint):
        return "fields of its own, which follow"
    if origin is list:
        return f"list of {kind(parts[0])}"
    if origin is dict:
        return f"{kind(parts[0])} to {kind(parts[1])}"
    return _WORDS[hint]


def descriptions_of(section: type) -> tuple[str, dict[str, str]]:
    """Returns the description of a section, and that of each of its fields by name.

    Raises:
        ValueError: A field has no description, or one is described that is not there.
    """
    parsed = docstring_parser.parse(section.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    descriptions = {param.arg_name: param.description or "" for param in parsed.params}
    names = [field.name for field in dataclasses.fields(section)]
    if list(descriptions) != names:
        raise ValueError(f"{section.__name__} describes {list(descriptions)}, and has {names}")
    return " ".join(filter(None, [parsed.short_description, parsed.long_description])), descriptions


class Fields(SphinxDirective):
    """A definition for each field of the section that is named."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See `Directive.run`."""
        name = self.arguments[0]
        section = ALL[name]
        self.env.note_dependency(__file__)
        about, descriptions = descriptions_of(section)
        definitions = nodes.definition_list(classes=["fields"])
        for field in dataclasses.fields(section):
            limits = field_types(section)[field.name].range
            type_words = kind(get_type_hints(section)[field.name]) + (f", {limits}" if limits else "")
            definitions += self._defined(name, field, type_words, descriptions[field.name])
        return [*self.parse_text_to_nodes(about), definitions]

    def _defined(
        self, section: str, field: dataclasses.Field[Any], type_words: str, description: str
    ) -> nodes.definition_list_item:
        term = nodes.term("", "", nodes.literal("", f"{section}.{field.name}"), ids=[anchor(section, field.name)])
        facts = "; ".join([type_words, *_facts(field)])
        about = nodes.definition("", *self.parse_text_to_nodes(f"{facts}\n\n{description}"))
        about[0]["classes"].append("facts")
        return nodes.definition_list_item("", term, about)


def _facts(field: dataclasses.Field[Any]) -> Iterator[str]:
    if dataclasses.is_dataclass(field.default):
        return
    if field.default is None:
        yield "by default not set"
    elif field.default is not dataclasses.MISSING:
        yield f"default `{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    if field.metadata.get("affects_result"):
        yield "decides the result"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("fields", Fields)
    return {"parallel_read_safe": True}
