"""Errors of this package. Each message says what happened, where, and what to do."""


class IPCError(Exception):
    """Base of every error that this package raises on purpose."""


class HandleFileError(IPCError):
    """The handle file is missing, truncated, garbled, of another format, or not safe to trust."""


class HeaderError(IPCError):
    """The shared header's bytes do not fit the handle file, or fail their checksum."""


class AttachError(IPCError):
    """The handle is sound, but this process cannot map the memory it names."""


class NoRoomError(IPCError):
    """This process cannot map the memory for lack of memory on its GPU. It may find some when it is started again."""


class ExporterAliveError(IPCError):
    """A live exporter already publishes at this path."""


class ExporterDiedError(IPCError):
    """The process that published is gone, and nothing readable is left."""


class ShareTimeoutError(IPCError):
    """A wait reached its deadline."""


class VersionGoneError(IPCError):
    """The version that was asked for has been overwritten by a newer one."""


class MismatchError(IPCError):
    """The model's tensors and the published ones differ in name, shape, dtype or device."""


class ForkedError(IPCError):
    """An object was opened in another process, and this is a forked child of it."""
