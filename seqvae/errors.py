"""How data can end a run, apart from bugs."""


class DataError(Exception):
    """The data cannot be used as asked: where, what was found, what was wanted, what to do. Ends a command with exit 3."""


class DamagedFileError(DataError):
    """A file that looked well from outside and cannot be read to its end."""


class SettingsError(ValueError):
    """Settings that are fine by themselves but do not go with these data. Ends a command with exit 2."""


class StorageError(Exception):
    """A directory cannot be written or a disk is full. Ends a command with exit 6."""


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own, a GPU's, or that of torch's CPU allocator, which has no type. Torch is not imported to find out."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error)
    )
