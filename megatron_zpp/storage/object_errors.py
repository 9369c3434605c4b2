"""How names in object stores begin, and the errors of requests: what is known without importing a store."""

S3 = "s3://"


class ObjectError(OSError):
    """A request to an object store failed. `strerror` says why and what to do, `filename` is the URL."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class NoObject(ObjectError, FileNotFoundError):
    """There is no such object."""


class Conflict(ObjectError):
    """The object is not the one that a conditional request was for."""
