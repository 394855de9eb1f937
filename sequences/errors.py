"""The two ways in which data can end a run, apart from bugs."""


class DataError(Exception):
    """The data cannot be used as asked: where, what was found, what was wanted, what to do. Ends a command with exit 3."""


class StorageError(Exception):
    """A directory cannot be written or a disk is full. Ends a command with exit 6."""
