"""Models of the Hugging Face hub: from its cache on disk, and from a hub on this computer."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest
import tiny_models

from models_jax.loading import load_checkpoint
from planner.checkpoint import model_folder, model_hash
from planner.errors import UserError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache on disk with one model, and no network."""
    from huggingface_hub import constants

    base = tmp_path / "hub" / "models--owner--name"
    revision = "0123456789abcdef0123456789abcdef01234567"
    tiny_models.write(base / "snapshots" / revision)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return base / "snapshots" / revision


def test_a_model_of_the_hub_is_found_in_its_cache(hub):
    assert model_folder("hub/owner/name") == hub
    assert model_folder(f"hub/owner/name@{hub.name}") == hub
    config, _ = load_checkpoint(model_folder("hub/owner/name"))
    assert config == tiny_models.config()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hub/owner/other", "owner/other is not in the cache and HF_HUB_OFFLINE is set"),
        ("hub/owner/name@other", "HF_HUB_OFFLINE is set"),
        ("hub/a/b/c", "'a/b/c' names no model of the hub"),
    ],
)
def test_models_that_the_hub_cannot_give_are_named(hub, model, message):
    with pytest.raises(UserError, match=message) as raised:
        model_folder(model, "roles.draft.model")
    assert raised.value.where == "roles.draft.model"


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs; the files are those of `folder`."""

    folder: Path
    revision = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def answer(self, send: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
        if path == "/api/models/owner/name/revision/main":
            names = [{"rfilename": name} for name, _ in files]
            body = json.dumps({"id": "owner/name", "sha": self.revision, "siblings": names}).encode()
        elif path == f"/api/models/owner/name/tree/{self.revision}":
            tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files]
            body = json.dumps(tree).encode()
        elif path.startswith("/owner/name/resolve/"):
            body = (self.folder / path.rpartition("/")[2]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if "/api/" in path else "application/octet-stream")
        self.send_header("ETag", hashlib.sha256(body).hexdigest())
        self.send_header("X-Repo-Commit", self.revision)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path):
    """(what it has of the model owner/name, its address) of a hub on this computer."""
    folder = tmp_path / "published"
    tiny_models.write(folder)
    (folder / "consolidated.safetensors").write_text("the same weights again")
    handler = type("Handler", (FakeHub,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield folder, f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join(10)


DOWNLOAD = """
from planner.checkpoint import model_folder
from planner.errors import UserError
print(model_folder("hub/owner/name"))
try:
    model_folder("hub/owner/other")
except UserError as bad:
    print(bad)
"""


def test_a_model_of_the_hub_is_downloaded(server, tmp_path):
    """In a process of its own, since huggingface_hub reads its address when it is imported."""
    published, address = server
    settings = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    folder, refusal = done.stdout.splitlines()
    assert refusal == "the hub has no model owner/other; check the name, or set HF_TOKEN"
    (published / "consolidated.safetensors").unlink()  # it is not among the files that are wanted
    assert model_hash(Path(folder)) == model_hash(published)
    assert load_checkpoint(Path(folder))[0] == tiny_models.config()
