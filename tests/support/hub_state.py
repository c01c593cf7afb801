"""What the Hub on localhost keeps: repositories, their commits and the contents of files."""

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USER = "tester"


@dataclass(frozen=True)
class StoredFile:
    """A file in a commit: `blob_id` as git names it, `sha256` of a large one only."""

    blob_id: str
    size: int
    sha256: str | None = None

    @property
    def key(self) -> str:
        """Its name in the storage, and its ETag."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class Commit:
    """The files at one point of a branch."""

    oid: str
    title: str
    files: dict[str, StoredFile]


@dataclass
class Repository:
    """The commits of a repository, by their names, and where its branches are."""

    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, Commit] = field(default_factory=dict)


class Refusal(Exception):  # noqa: N818
    """An answer other than success, in the Hub's form."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: Any):
        super().__init__(message)
        self.status, self.body = status, {"error": message} | body
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Hub:
    """Repositories by `user/name`, one token that may write to them, and the contents of files in a folder.

    Args:
        folder (`Path`): where the contents of files are kept.
    """

    # Set when it is served: the Hub itself, and the storage of large files under another host name.
    endpoint: str
    storage_endpoint: str

    def __init__(self, folder: Path):
        self.folder = folder
        self.token = f"hf_{secrets.token_hex(17)}"
        self.signature = secrets.token_hex(16)
        self.repositories: dict[str, Repository] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def files(self, name: str, revision: str = "main") -> dict[str, StoredFile]:
        """The files of a repository at a branch or commit."""
        return self.commit(name, revision).files

    def content(self, name: str, path: str, revision: str = "main") -> bytes:
        """The bytes of a file."""
        return (self.folder / self.files(name, revision)[path].key).read_bytes()

    def repository(self, name: str) -> Repository:
        """A repository by `user/name`."""
        if name not in self.repositories:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return self.repositories[name]

    def commit(self, name: str, revision: str) -> Commit:
        """The newest commit of a branch, or a commit by its name."""
        repository = self.repository(name)
        commit = repository.branches.get(revision) or repository.commits.get(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def keep(self, content: bytes) -> StoredFile:
        """Store a small file under the name that git gives it."""
        blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (self.folder / blob_id).write_bytes(content)
        return StoredFile(blob_id, len(content))

    def keep_large(self, oid: str, content: bytes) -> None:
        """Store a large file if it is what its name says."""
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refusal(400, f"the content does not have the sha256 {oid}")
        (self.folder / oid).write_bytes(content)

    def add_commit(self, repository: Repository, branch: str, title: str, files: dict[str, StoredFile]) -> Commit:
        """Put a commit on a branch."""
        parent = repository.branches.get(branch)
        made_of = [parent and parent.oid, title, sorted((path, file.key) for path, file in files.items())]
        commit = Commit(hashlib.sha1(json.dumps(made_of).encode()).hexdigest(), title, files)
        repository.commits[commit.oid] = repository.branches[branch] = commit
        return commit
