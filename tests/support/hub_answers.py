"""The answers of the Hub on localhost, by method and address."""

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import yaml
from support.hub_state import USER, Hub, Refusal, Repository, StoredFile

LARGE_BYTES = 10_000_000
LARGE_SUFFIXES = (".safetensors", ".bin", ".pt", ".npz", ".h5", ".onnx", ".model")
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of a response; the body is JSON unless it is bytes."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


NEEDS_TOKEN = True
ROUTES: list[tuple[str, re.Pattern[str], bool, Callable[..., Answer]]] = []


def route(methods: str, pattern: str, needs_token: bool = False) -> Callable[[Callable[..., Answer]], Any]:
    """Register an answer; `{name}` stands for `user/repository`, `{rev}` for a revision and `{path}` for the rest."""
    parts = {"{name}": r"(?P<name>[^/]+/[^/]+?)", "{rev}": r"(?P<revision>[^/]+)", "{path}": r"(?P<path>.+)"}
    for placeholder, expression in parts.items():
        pattern = pattern.replace(placeholder, expression)

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        ROUTES.extend((method, re.compile(pattern), needs_token, function) for method in methods.split())
        return function

    return register


@route("GET", "/api/whoami-v2", NEEDS_TOKEN)
def whoami(hub: Hub, **_: Any) -> Answer:
    token = {"displayName": "test", "role": "write"}
    return Answer({"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token", "accessToken": token}})


@route("POST", "/api/validate-yaml")
def validate_card(hub: Hub, body: bytes, **_: Any) -> Answer:
    front = re.match(r"---\r?\n(.*?)\r?\n---", json.loads(body)["content"], re.DOTALL)
    if front is None:
        return Answer({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    try:
        valid = isinstance(yaml.safe_load(front[1]) or {}, dict)
    except yaml.YAMLError:
        valid = False
    if not valid:
        raise Refusal(400, "invalid metadata", errors=[{"message": "the metadata is not YAML"}], warnings=[])
    return Answer({"errors": [], "warnings": []})


@route("POST", "/api/repos/create", NEEDS_TOKEN)
def create_repository(hub: Hub, body: bytes, **_: Any) -> Answer:
    wanted = json.loads(body)
    owner = wanted.get("organization") or USER
    name = f"{owner}/{wanted['name']}"
    if wanted.get("type") not in (None, "model"):
        raise Refusal(400, "this Hub keeps models only")
    if owner != USER:
        raise Refusal(403, f"You don't have the rights to create a model under the namespace {owner!r}")
    url = f"{hub.endpoint}/{name}"
    if name in hub.repositories:
        raise Refusal(409, "You already created this model repo", url=url)
    repository = hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
    large = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_SUFFIXES)
    hub.add_commit(repository, "main", "initial commit", {".gitattributes": hub.keep(large.encode())})
    return Answer({"url": url, "name": name, "id": secrets.token_hex(12)})


@route("POST", "/api/models/{name}/branch/{rev}", NEEDS_TOKEN)
def create_branch(hub: Hub, name: str, revision: str, body: bytes, **_: Any) -> Answer:
    if revision in hub.repository(name).branches:
        raise Refusal(409, f"Reference already exists: {revision}")
    start = json.loads(body or b"{}").get("startingPoint", "main")
    hub.repository(name).branches[revision] = hub.commit(name, start)
    return Answer({}, HTTPStatus.CREATED)


@route("POST", "/api/models/{name}/preupload/{rev}", NEEDS_TOKEN)
def how_to_upload(hub: Hub, name: str, revision: str, body: bytes, **_: Any) -> Answer:
    present = hub.files(name, revision)
    modes = []
    for file in json.loads(body)["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"])
        large = file["size"] > LARGE_BYTES or path.endswith(LARGE_SUFFIXES) or b"\0" in sample
        known = {"oid": present[path].key} if path in present else {}
        modes.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False} | known)
    return Answer({"files": modes})


@route("POST", r"/{name}\.git/info/lfs/objects/batch", NEEDS_TOKEN)
def where_to_upload(hub: Hub, name: str, body: bytes, **_: Any) -> Answer:
    hub.repository(name)
    objects: list[dict[str, Any]] = []
    for wanted in json.loads(body)["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        objects.append({"oid": oid, "size": size})
        if (hub.folder / oid).exists():
            continue
        signed = f"{hub.storage_endpoint}/storage/{oid}?signature={hub.signature}"
        verify = {"href": f"{hub.endpoint}/{name}.git/info/lfs/objects/verify"}
        objects[-1]["actions"] = {"upload": {"href": signed}, "verify": verify}
    return Answer({"transfer": "basic", "objects": objects})


@route("POST", r"/{name}\.git/info/lfs/objects/verify", NEEDS_TOKEN)
def verify_upload(hub: Hub, body: bytes, **_: Any) -> Answer:
    claimed = json.loads(body)
    stored = hub.folder / claimed["oid"]
    if not stored.exists() or stored.stat().st_size != claimed["size"]:
        raise Refusal(404, f"the storage holds no {claimed['oid']} of {claimed['size']} bytes")
    return Answer({})


@route("GET PUT", "/storage/(?P<oid>[0-9a-f]{64})")
def storage(hub: Hub, oid: str, method: str, body: bytes, query: dict[str, list[str]], **_: Any) -> Answer:
    if query.get("signature") != [hub.signature]:
        raise Refusal(403, "the address is not signed")
    if method == "GET":
        return Answer((hub.folder / oid).read_bytes())
    hub.keep_large(oid, body)
    return Answer()


@route("POST", "/api/models/{name}/commit/{rev}", NEEDS_TOKEN)
def add_commit(hub: Hub, name: str, revision: str, body: bytes, query: dict[str, list[str]], **_: Any) -> Answer:
    repository = hub.repository(name)
    if "create_pr" in query or revision not in repository.branches:
        raise Refusal(400, f"a commit goes to a branch, {revision} is none")
    files = dict(hub.files(name, revision))
    title = ""
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            title = value["summary"]
            if value.get("parentCommit", hub.commit(name, revision).oid) != hub.commit(name, revision).oid:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        elif entry["key"] == "file":
            files[value["path"]] = hub.keep(base64.b64decode(value["content"]))
        elif entry["key"] == "lfsFile":
            files[value["path"]] = _pointer_to(hub, value["oid"], value["size"])
        elif entry["key"] == "deletedFile":
            if files.pop(value["path"], None) is None:
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        else:
            raise Refusal(400, f"this Hub does not know the operation {entry['key']}")
    made = hub.add_commit(repository, revision, title, files)
    return Answer({"success": True, "commitOid": made.oid, "commitUrl": f"{hub.endpoint}/{name}/commit/{made.oid}"})


def _pointer_to(hub: Hub, oid: str, size: int) -> StoredFile:
    stored = hub.folder / oid
    if not stored.exists() or stored.stat().st_size != size:
        raise Refusal(400, f"LFS object {oid} was not uploaded")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
    return StoredFile(hub.keep(pointer).blob_id, size, oid)


@route("GET", "/api/models/{name}(?:/revision/{rev})?")
def model_info(hub: Hub, name: str, revision: str, **_: Any) -> Answer:
    commit = hub.commit(name, revision or "main")
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    known = {"id": name, "modelId": name, "author": name.split("/")[0], "private": hub.repository(name).private}
    return Answer(known | {"sha": commit.oid, "lastModified": DATE, "siblings": siblings, "tags": []})


@route("GET", "/api/models/{name}/tree/{rev}(?:/{path})?")
def list_files(hub: Hub, name: str, revision: str, path: str, query: dict[str, list[str]], **_: Any) -> Answer:
    files = hub.files(name, revision)
    before = f"{path}/" if path else ""
    inside = {place: file for place, file in sorted(files.items()) if place.startswith(before)}
    if before and not inside:
        commit = hub.commit(name, revision)
        return Answer(
            {"error": f"{path} does not exist on {revision}"},
            HTTPStatus.NOT_FOUND,
            {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.oid},
        )
    recursive = query.get("recursive", ["false"])[0].lower() == "true"
    entries: dict[str, dict[str, Any]] = {}
    for place, file in inside.items():
        parents = place.removeprefix(before).split("/")[:-1]
        for depth in range(len(parents) if recursive else min(len(parents), 1)):
            folder = before + "/".join(parents[: depth + 1])
            oid = hashlib.sha1(folder.encode()).hexdigest()
            entries[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
        if recursive or not parents:
            large = {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}} if file.sha256 else {}
            entries[place] = {"type": "file", "path": place, "oid": file.blob_id, "size": file.size} | large
    return Answer(list(entries.values()))


@route("GET HEAD", "/{name}/resolve/{rev}/{path}")
def read_file(hub: Hub, name: str, revision: str, path: str, **_: Any) -> Answer:
    commit = hub.commit(name, revision)
    headers = {"X-Repo-Commit": commit.oid}
    file = commit.files.get(path)
    if file is None:
        # Clients remember by the commit that a file is not there.
        return Answer({"error": "Entry not found"}, HTTPStatus.NOT_FOUND, headers | {"X-Error-Code": "EntryNotFound"})
    if file.sha256 is None:
        return Answer((hub.folder / file.key).read_bytes(), headers=headers | {"ETag": f'"{file.key}"'})
    headers |= {"X-Linked-Etag": f'"{file.key}"', "X-Linked-Size": str(file.size)}
    signed = f"{hub.storage_endpoint}/storage/{file.key}?signature={hub.signature}"
    return Answer(status=HTTPStatus.FOUND, headers=headers | {"Location": signed})
