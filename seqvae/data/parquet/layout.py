"""Which column plays which part, what may stand in it, and whether a file has it all."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from seqvae.data.description import Kind
from seqvae.data.parquet.column_types import Column, family, goes_with
from seqvae.data.parquet.files import Footer
from seqvae.errors import DataError

NUMBERS = ("integer", "float", "null")
TOKEN_LISTS = ("list of integer", "list of null")
VECTOR_LISTS = tuple(f"list of {inner}" for one in NUMBERS for inner in (one, f"list of {one}"))
ALLOWED = {
    "id": (("integer", "float", "text"), "whole numbers or text"),
    "time": (("integer", "float", "time", "null"), "numbers or time stamps"),
    "variable": (("integer", "float", "text"), "text or whole numbers"),
    "value": (NUMBERS, "numbers"),
    "set_index": (NUMBERS, "whole numbers"),
    "label": (("integer", "float", "text", "null"), "whole numbers or text"),
    "feature": (NUMBERS, "numbers"),
    "text": (("text",), "text"),
    "tokens": (TOKEN_LISTS, "lists of whole numbers"),
    "vectors": (VECTOR_LISTS, "lists of numbers, or lists of such lists"),
}
"""Part -> families of types that can play it, and how to say so."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which column plays which part."""

    kind: Kind
    form: Literal["rows", "table", "files"]
    """One sequence a row; a long table with an id; long tables of one sequence each, whose id is the file's stem."""

    sequence: str | None = None
    is_text: bool = False
    id: str | None = None
    time: str | None = None
    variable: str | None = None
    value: str | None = None
    set_index: str | None = None
    features: tuple[str, ...] = ()
    label: str | None = None
    time_unit: str = ""
    """Events: minutes where the column says so, else the column's name: the unit is then the user's."""

    @property
    def columns(self) -> list[str]:
        parts = (
            self.sequence,
            self.id,
            self.time,
            self.variable,
            self.value,
            self.set_index,
            *self.features,
            self.label,
        )
        return list(dict.fromkeys(part for part in parts if part is not None))

    def describe(self) -> str:
        """One line for the header: what was detected."""
        where = {
            "rows": f"one sequence a row in column {self.sequence!r}" + (" (text)" if self.is_text else ""),
            "table": f"long table, id {self.id!r}",
            "files": "one sequence a file, id = the file's name",
        }[self.form]
        parts = [f"{self.kind}: {where}"]
        roles = ("time", "variable", "value", "set_index", "label")
        parts += [f"{role} {column!r}" for role in roles if (column := getattr(self, role))]
        if self.form == "rows":
            parts.append(f"id {self.id!r}" if self.id else "ids are row numbers")
        if self.features:
            shown = ", ".join(map(repr, self.features[:6])) + (", ..." if len(self.features) > 6 else "")
            parts.append(f"{len(self.features)} feature{'s' * (len(self.features) > 1)} ({shown})")
        return ", ".join(parts)


def check_schema(footer: Footer, layout: Layout, columns: Mapping[str, Column]) -> None:
    """Refuse a file that lacks a column of the layout or holds another kind of thing in it than most files."""
    skip = "or leave such files out with --on_bad_files skip"
    for name in layout.columns:
        common, found = columns[name], footer.schema.names.count(name)
        if found == 0:
            raise DataError(
                f"{footer.path}: column {name!r} is missing, but {common.path.name} has it"
                f"{closest(name, footer.schema.names)} Add or rename it, {skip}."
            )
        if found > 1:
            raise DataError(f"{footer.path}: column {name!r} stands there {found} times. Rename all but one, {skip}.")
        here = footer.schema.field(name).type
        if not goes_with(here, common.type):
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but {common.type} in {common.path.name}. "
                f"Convert one of them, {skip}."
            )
        families, wanted = ALLOWED[_part_of(name, layout)]
        if family(here) not in families:
            role = role_of(name, layout)
            flag = {"feature": "--feature_columns", "set_index": None}.get(role, f"--{role}_column")
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but must hold {wanted}. "
                + (f"Convert it, or choose another with {flag}." if flag else "Convert or rename it.")
            )


def _part_of(name: str, layout: Layout) -> str:
    if name == layout.sequence:
        return "text" if layout.is_text else layout.kind
    return role_of(name, layout)


def role_of(name: str, layout: Layout) -> str:
    roles = ("sequence", "id", "time", "variable", "value", "set_index", "label")
    return next((role for role in roles if getattr(layout, role) == name), "feature")


def closest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is not there."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
