"""The Hub on localhost that the other tests push to, used by `huggingface_hub` in processes of its own."""

import hashlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import HubServer

# Of what tests need, not of the package, and in processes of their own.
pytestmark = pytest.mark.slow

TEXT = "a file\nof text ü\n"
# Several parts and a short last one.
LARGE = 3_000_001
PART = 1_000_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", part_bytes=PART) as server:
        yield server


def client(hub: HubServer, code: str, token: str | None = None, fails: bool = False, home: str = "home") -> list[str]:
    """The lines that a fresh client prints: `api` is there, `refused(error, call)` prints the refusal of a call."""
    before = """
        import huggingface_hub as hub
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
        from huggingface_hub.errors import *
        api = HfApi()

        def refused(error, call, *arguments, **keywords):
            try:
                call(*arguments, **keywords)
            except error as found:
                print(type(found).__name__, found.response.status_code, str(found).splitlines()[-1])
            else:
                raise AssertionError("it was not refused")
    """
    code = textwrap.dedent(before) + textwrap.dedent(code)
    return hub.run("-c", code, home=hub.folder.parent / home, token=token, fails=fails).splitlines()


def test_a_text_and_a_large_file_there_and_back(hub: HubServer) -> None:
    content = hashlib.shake_256(b"weights").digest(LARGE)
    (hub.folder.parent / "large").write_bytes(content)
    pushed = f"""
        print(api.whoami()["name"])
        name = api.create_repo("words").repo_id
        assert name == api.create_repo("words", exist_ok=True).repo_id == "tester/words"
        operations = [
            CommitOperationAdd("folder/text.txt", {TEXT!r}.encode()),
            CommitOperationAdd("large.safetensors", {str(hub.folder.parent / "large")!r}),
            CommitOperationAdd("short.safetensors", b"short"),
            CommitOperationAdd("empty.safetensors", b""),
        ]
        print(api.create_commit(name, operations, commit_message="both").oid)
    """
    user, commit = client(hub, pushed, hub.token)
    assert user == "tester"
    files = hub.files("tester/words")
    assert list(files) == [
        ".gitattributes",
        "folder/text.txt",
        "large.safetensors",
        "short.safetensors",
        "empty.safetensors",
    ]
    assert files["large.safetensors"].sha256 == hashlib.sha256(content).hexdigest()
    assert files["folder/text.txt"].sha256 is None

    read = """
        import hashlib
        from pathlib import Path
        info = api.model_info("tester/words")
        print(info.sha)
        print(*(file.rfilename for file in info.siblings))
        print(*(f"{file.path}:{getattr(file, 'size', 0)}" for file in api.list_repo_tree("tester/words")))
        print(*(file.path for file in api.list_repo_tree("tester/words", "folder")))
        print(*(file.path for file in api.list_repo_tree("tester/words", recursive=True)))
        folder = Path(hub.snapshot_download("tester/words"))
        print(hashlib.sha256((folder / "large.safetensors").read_bytes()).hexdigest())
        print(repr((folder / "folder" / "text.txt").read_text(encoding="utf-8")))
        assert hub.hf_hub_download("tester/words", "large.safetensors") == str(folder / "large.safetensors")
    """
    seen = client(hub, read, home="another")
    names = [".gitattributes", "empty.safetensors", "folder/text.txt", "large.safetensors", "short.safetensors"]
    assert seen[:2] == [commit, " ".join(names)]
    assert f"large.safetensors:{LARGE}" in seen[2]
    assert "folder:0" in seen[2]
    assert seen[3] == "folder/text.txt"
    assert seen[4].split() == [".gitattributes", "empty.safetensors", "folder", *names[2:]]
    assert seen[5:] == [hashlib.sha256(content).hexdigest(), repr(TEXT)]


def test_large_files_go_to_the_storage_in_parts_and_the_token_does_not(hub: HubServer) -> None:
    push = f"""
        api.create_repo("parts")
        api.upload_file(path_or_fileobj=bytes({LARGE}), path_in_repo="zeros.bin", repo_id="tester/parts")
        hub.hf_hub_download("tester/parts", "zeros.bin")
        print(*(commit.title for commit in api.list_repo_commits("tester/parts")), sep="|")
        api.upload_file(path_or_fileobj=bytes({LARGE}), path_in_repo="again.bin", repo_id="tester/parts")
    """
    assert client(hub, push, hub.token) == ["Upload zeros.bin with huggingface_hub|initial commit"]
    assert hub.content("tester/parts", "zeros.bin") == hub.content("tester/parts", "again.bin") == bytes(LARGE)
    stored = [request for request in hub.requests if request.path.startswith("/storage/")]
    # Known content is not sent a second time.
    assert [request.method for request in stored] == ["PUT"] * 4 + ["POST", "GET"]
    assert all(request.host.startswith("localhost:") and not request.with_token for request in stored)
    others = [request for request in hub.requests if request not in stored]
    assert all(request.host.startswith("127.0.0.1:") and request.with_token for request in others)
    assert all(hub.token not in request.path for request in hub.requests)


def test_content_that_is_not_what_its_sha256_says_is_refused(hub: HubServer) -> None:
    push = """
        api.create_repo("wrong")
        operation = CommitOperationAdd("wrong.bin", b"some bytes")
        operation.upload_info.sha256 = bytes(32)
        api.create_commit("tester/wrong", [operation], commit_message="wrong")
    """
    assert "400 Bad Request" in "\n".join(client(hub, push, hub.token, fails=True))
    assert list(hub.files("tester/wrong")) == [".gitattributes"]


@pytest.mark.parametrize("token", [None, "hf_somebodyelses"])
def test_writing_needs_the_token(token: str | None, hub: HubServer) -> None:
    client(hub, 'api.create_repo("mine")', hub.token)
    lines = client(
        hub,
        """
        add = CommitOperationAdd("text.txt", b"text")
        refused(HfHubHTTPError, api.create_repo, "other")
        refused(HfHubHTTPError, api.create_commit, "tester/mine", [add], commit_message="no")
        refused(HfHubHTTPError, api.create_branch, "tester/mine", branch="other")
        """,
        token,
    )
    said = "Invalid username or password." if token is None else "Invalid credentials in Authorization header"
    assert all(line.startswith("HfHubHTTPError 401") and line.endswith(said) for line in lines), lines
    assert len(lines) == 3
    assert list(hub.repositories) == ["tester/mine"]
    assert len(hub.repositories["tester/mine"].commits) == 1


def test_what_is_not_there(hub: HubServer) -> None:
    code = """
        api.create_repo("known")
        load = hub.hf_hub_download
        refused(RepositoryNotFoundError, api.model_info, "tester/unknown")
        refused(RepositoryNotFoundError, load, "tester/unknown", "text.txt")
        refused(RemoteEntryNotFoundError, load, "tester/known", "text.txt")
        refused(RevisionNotFoundError, load, "tester/known", "text.txt", revision="unknown")
        refused(HfHubHTTPError, api.create_repo, "somebody/model")
        print(api.repo_exists("tester/known"), api.repo_exists("tester/unknown"))
        print(api.file_exists("tester/known", ".gitattributes"), api.file_exists("tester/known", "text.txt"))
    """
    lines = client(hub, code, hub.token)
    assert [" ".join(line.split()[:2]) for line in lines[:5]] == [
        "RepositoryNotFoundError 404",
        "RepositoryNotFoundError 404",
        "RemoteEntryNotFoundError 404",
        "RevisionNotFoundError 404",
        "HfHubHTTPError 403",
    ]
    assert lines[5:] == ["True False", "True False"]


def test_an_older_revision_and_a_branch(hub: HubServer) -> None:
    code = """
        from pathlib import Path
        name = api.create_repo("history").repo_id

        def push(content, **keywords):
            operation = CommitOperationAdd("text.txt", content)
            return api.create_commit(name, [operation], commit_message=content.decode(), **keywords).oid

        def read(revision):
            return Path(hub.hf_hub_download(name, "text.txt", revision=revision)).read_text()

        first = push(b"first")
        second = push(b"second")
        assert second == push(b"second"), "an unchanged file makes no commit"
        api.create_branch(name, branch="a/branch", revision=first)
        push(b"third", revision="a/branch")
        print(read(first), read(second), read("main"), read("a/branch"))
        refused(HfHubHTTPError, push, b"fourth", parent_commit=first)
        api.create_commit(name, [CommitOperationDelete("text.txt")], commit_message="gone")
        print(*api.list_repo_files(name))
        print(read(second))
        print(*(commit.title for commit in api.list_repo_commits(name)))
    """
    words, refusal, files, older, titles = client(hub, code, hub.token)
    assert words == "first second second third"
    assert refusal.startswith("HfHubHTTPError 412")
    assert files == ".gitattributes"
    assert older == "second"
    assert titles == "gone second first initial commit"


def test_a_private_repository_and_a_card(hub: HubServer) -> None:
    push = """
        api.create_repo("secret", private=True)
        card = b"---\\ntags: [a]\\n---\\n# Card"
        api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="tester/secret")
        print(hub.ModelCard.load("tester/secret").data.tags, api.model_info("tester/secret").private)
        try:
            api.upload_file(path_or_fileobj=b"---\\na: [\\n---\\n", path_in_repo="README.md", repo_id="tester/secret")
        except ValueError as error:
            print(str(error).splitlines()[0])
    """
    assert client(hub, push, hub.token) == ["['a'] True", "Invalid metadata in README.md."]
    (line,) = client(hub, 'refused(RepositoryNotFoundError, api.model_info, "tester/secret")', home="another")
    assert line.startswith("RepositoryNotFoundError 404")
