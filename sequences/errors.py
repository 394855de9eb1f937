"""How data can end a run, apart from bugs."""


class DataError(Exception):
    """The data cannot be used as asked: where, what was found, what was wanted, what to do. Ends a command with exit 3."""


class DamagedFileError(DataError):
    """A file that looked well from outside and cannot be read to its end."""


class SettingsError(ValueError):
    """Settings that are fine by themselves but do not go with these data. Ends a command with exit 2."""


class StorageError(Exception):
    """A directory cannot be written or a disk is full. Ends a command with exit 6."""
