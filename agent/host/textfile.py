"""Small files that people write, read whole and never beyond a bound."""

from pathlib import Path

from agent.core.errors import SettingsError


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises SettingsError with what to do."""
    try:
        if path.is_fifo() and path.parent != Path("/dev"):  # /dev/stdin is a person's
            raise SettingsError(f"{path}: is a pipe, which is waited for; name a regular file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"{path}: cannot be read: {reason}; check the path and its rights"
        ) from error
    check_size(path, content, limit)
    return content


def check_size(path: Path, content: bytes, limit: int) -> None:
    """Nothing, for at most `limit` bytes. Raises SettingsError."""
    if len(content) > limit:
        raise SettingsError(f"{path}: is larger than {limit // 1024} KiB; is it the right file?")
