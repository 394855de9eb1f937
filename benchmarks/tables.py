"""A benchmark's report -> Markdown: where and how it was measured, and its rows as a table.

In: the last line of JSON of a benchmark, read. A report of one data set after the other holds those of each in a list, `sets`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def provenance(report: Report) -> str:
    """Machine, day and command; one line for all data sets that were measured on the same machine and day."""
    if "sets" not in report:
        data = f", {report['data']}" if "data" in report else ""
        return f"{_machine(report)}; `{report['command']}`{data}:"
    commands: dict[str, list[str]] = {}
    for one in report["sets"]:
        commands.setdefault(_machine(one), []).append(one["command"])
    return "\n".join(f"{machine}; {_in_one_breath(several)}:" for machine, several in commands.items())


def _in_one_breath(commands: Sequence[str]) -> str:
    """The first command, and of those that call the same module the rest of the line.

    >>> _in_one_breath(["python -m a.b --data c", "python -m a.b --data d"])
    '`python -m a.b --data c`, `--data d`'
    """
    module = " ".join(commands[0].split()[:3])
    others = [command.removeprefix(f"{module} ") for command in commands[1:]]
    return ", ".join(f"`{one}`" for one in [commands[0], *others])


def _machine(report: Report) -> str:
    machine = report["machine"]
    units = {True: " with bf16 units", False: " without bf16 units", None: ""}[machine.get("bf16_units")]
    memory = f"{machine['memory_gb']} GB, Python {machine['python']}; {machine['date']}"
    return f"{machine['cores']} CPU cores{units}, {memory}"


def rows_at(report: Report, place: str) -> list[Row]:
    """The rows below keys with dots between them; of several data sets those of all that have such rows.

    >>> rows_at({"a": [{"n": 1, "b": {"x": 2}}]}, "a.b"), rows_at({}, "a.b")
    ([{'x': 2}], [])
    >>> rows_at({"sets": [{"a": [{"x": 1}]}, {}, {"a": [{"x": 2}, {"x": 3}]}]}, "sets.a")
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """
    found: Any = report
    for key in place.split("."):
        if isinstance(found, list):
            below = [one[key] for one in found if key in one]
            found = [row for one in below for row in (one if isinstance(one, list) else [one])]
        else:
            found = found.get(key, {})
    return found if isinstance(found, list) else [found] if found else []


def markdown(rows: Sequence[Row]) -> str:
    """Columns are those of the first row whose cells are not tables themselves."""
    names = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    lines = [names, ["---"] * len(names), *([cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: object) -> str:
    """
    >>> cell(12345), cell(0.5), cell("a|b"), cell(True), cell(None)
    ('12,345', '0.5', 'a\\\\|b', 'yes', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|")
