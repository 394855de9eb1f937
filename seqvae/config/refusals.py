"""What several groups of settings refuse alike, in the words of the flag."""


def refuse_below(least: int, group: object, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be {least} or more, got {value}")
