"""A folder in an object store, by its URL (s3://, gs://, hdfs://, …), with errors that say what is wrong."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from distill.errors import InputError
from pipelines.runs.files import write_bytes
from pipelines.settings.places import URL_MARK

CACHE_VARIABLE = "STILLROOM_CACHE"
ARROW = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")  # what Arrow reads without another package
STORES = ("s3", "gs", "gcs", "abfs", "abfss")  # of these, which have no folders
CONNECT_SECONDS, ANSWER_SECONDS, ATTEMPTS = 5, 60, 3  # until a server that doesn't answer is given up
DENIED = re.compile(r"ACCESS_DENIED|Access ?Denied|Forbidden|403|InvalidAccessKeyId|SignatureDoesNotMatch")


def find_cache() -> Path:
    """Returns the folder for local copies of what is at URLs: that of STILLROOM_CACHE, or one in the home."""
    return Path(os.environ.get(CACHE_VARIABLE, "~/.cache/stillroom")).expanduser()


class Stored(NamedTuple):
    """An object: its bytes, and what changes with its content (its ETag, or the time of its last change)."""

    size: int
    version: str


class RemoteFolder:
    """A folder in an object store.

    Args:
        url: Its URL.
        setting: Which setting has the URL, for messages.

    Raises:
        InputError: The kind of URL is unknown, or its package isn't installed.
    """

    def __init__(self, url: str, setting: str):
        self.url, self.setting = url.rstrip("/"), setting
        try:
            self.files, self.root = open_file_system(self.url)
        except ImportError as error:
            raise InputError(f"{setting} {url!r}: the library for it isn't installed: {shorten(error)}") from error
        except (ValueError, OSError) as error:
            raise InputError(
                f"{setting} {url!r}: expected a path, or a URL such as s3://bucket/folder, found another: "
                f"{shorten(error)}"
            ) from error

    def name(self, path: str) -> str:
        """Returns the URL of an object in the folder."""
        return f"{self.url}/{path}" if path else self.url

    def list(self) -> dict[str, Stored]:
        """Returns the objects in the folder by their path in it; empty if there is no such folder."""
        with self._explain(""):
            try:
                info = self.files.info(self.root)
                infos = {self.root: info} if info["type"] == "file" else self._find_all()
            except FileNotFoundError:
                return {}
        objects = {
            path.removeprefix(self.root).lstrip("/"): Stored(int(each["size"]), find_object_version(each))
            for path, each in infos.items()
        }
        check_inside(objects)
        return objects

    def read(self, path: str) -> bytes | None:
        """Returns the content of an object; None if it doesn't exist."""
        with self._explain(path):
            try:
                return bytes(self.files.cat_file(self._place(path)))
            except FileNotFoundError:
                return None

    def write(self, path: str, content: bytes) -> None:
        """Writes an object; whoever reads it meanwhile gets the old content or the new one.

        HDFS is the exception: its files are replaced while they are written.

        Raises:
            InputError: There is no such bucket.
        """
        with self._explain(path), self._explain_missing(path):
            self._make_parent(path)
            if isinstance(self.files, LocalFileSystem):
                write_bytes(Path(self._place(path)), content)
            else:
                self.files.pipe_file(self._place(path), content)

    def download(self, path: str, file: Path) -> None:
        """Copies an object to a file of this machine, which is complete or doesn't exist.

        Raises:
            InputError: There is no such object.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        with self._explain(path):
            try:
                self.files.get_file(self._place(path), str(partial))
            except FileNotFoundError as error:
                raise InputError(f"{self.setting} {self.name(path)!r}: no such object") from error
        partial.replace(file)

    def upload(self, file: Path, path: str) -> None:
        """Copies a file of this machine to an object.

        Raises:
            FileNotFoundError: There is no such file.
            InputError: There is no such bucket.
        """
        file.stat()
        with self._explain(path), self._explain_missing(path):
            self._make_parent(path)
            self.files.put_file(str(file), self._place(path))

    def remove(self, paths: Iterable[str]) -> None:
        """Removes objects; those that don't exist are left out."""
        for path in paths:
            with self._explain(path):
                try:
                    self.files.rm_file(self._place(path))
                except FileNotFoundError:
                    continue

    def _find_all(self) -> dict[str, Any]:
        """Returns the objects in the folder; fsspec's own search would leave out those that it may not see."""
        raises = type(self.files).find is AbstractFileSystem.find
        infos: dict[str, Any] = self.files.find(self.root, detail=True, **({"on_error": "raise"} if raises else {}))
        return infos

    def _place(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _make_parent(self, path: str) -> None:
        """Makes the folder of an object in a file system; a store has no folders, and would get a bucket."""
        if self.url.partition(URL_MARK)[0] not in STORES:
            self.files.makedirs(self._place(path).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _explain_missing(self, path: str) -> Iterator[None]:
        """Turns the error that there is nowhere to write to into a message.

        Raises:
            InputError: There is no such bucket.
        """
        try:
            yield
        except FileNotFoundError as error:
            raise InputError(
                f"{self.setting} {self.name(path)!r}: expected a bucket that exists, found none: {shorten(error)}"
            ) from error

    @contextmanager
    def _explain(self, path: str) -> Iterator[None]:
        """Turns the errors of libraries into messages with the URL.

        Raises:
            InputError: No permission, no such bucket, or no answer.
        """
        where = f"{self.setting} {self.name(path)!r}"
        try:
            yield
        except (InputError, FileNotFoundError):
            raise
        except OSError as error:
            if isinstance(error, PermissionError) or DENIED.search(str(error)):
                raise InputError(f"{where}: no permission; nothing here was changed: {shorten(error)}") from error
            raise InputError(f"{where}: can't be read or written: {shorten(error)}") from error


def open_file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URL, and the URL's path in it."""
    protocol, _, path = url.partition(URL_MARK)
    if protocol not in ARROW:
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        return files, str(root)
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    if protocol != "s3":
        files, root = fs.FileSystem.from_uri(url)
        return ArrowFSWrapper(files), str(root)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    files = fs.S3FileSystem(
        connect_timeout=CONNECT_SECONDS, request_timeout=ANSWER_SECONDS, endpoint_override=endpoint,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )  # fmt: skip
    return ArrowFSWrapper(files), path


def find_object_version(entry: Mapping[str, Any]) -> str:
    """Returns what changes with an object's content, from its description by fsspec."""
    names = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    return str(next((entry[name] for name in names if name in entry), ""))


def check_inside(paths: Iterable[str]) -> None:
    """Checks that paths that a store gives stay within their folder.

    Raises:
        InputError: One doesn't.
    """
    for path in paths:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise InputError(f"object {path!r}: expected a path within its folder, found one that leaves it")


def shorten(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
