"""Builds what a release has, into ``dist/``, and tries it: wheels, an sdist, an SBOM, checksums.

    python -m scripts.build_release      # or: make wheels

The wheel is built from the sdist, for any Python from 3.11 on (abi3) and any Linux from glibc 2.17 on, which
Zig's linker allows on any machine. One for aarch64 too, where Rust has its standard library:
``rustup target add aarch64-unknown-linux-gnu``. Then each Python of ``--pythons`` installs the wheel into an
environment of its own, without Rust, and serves requests with it: of the mock engines, and of an engine at a
URL. uvx runs it too.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
GLIBC = "manylinux_2_17"
HOST = "x86_64-unknown-linux-gnu"
OTHERS = ("aarch64-unknown-linux-gnu",)
WORKSPACE = "native/Cargo.toml"
READY_S = 60.0


def main() -> None:
    """Build, try, and say what there is."""
    parser = argparse.ArgumentParser(
        description="Build wheels, an sdist, an SBOM and checksums; takes minutes."
    )
    parser.add_argument("--pythons", nargs="*", default=["python3.11", "python3.12", "python3.13"])
    pythons = [python for python in parser.parse_args().pythons if is_here(python)]
    if not pythons:
        sys.exit("wheels: none of the Pythons is here that should install them")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    sdist = build_sdist()
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(sdist, Path(folder))
        run(["cargo", "build", "--release", "--locked", "-p", "kvrouter-c"], source / "native")
        for target in (HOST, *OTHERS):
            if target in rust_targets():
                build_wheel(source, target)
            else:
                print(f"wheels: none for {target}: rustup target add {target} first")
    (wheel,) = DIST.glob("*x86_64.whl")
    for number, python in enumerate(pythons):
        try_wheel(wheel, python, sbom=DIST / "sbom.cyclonedx.json" if number == 0 else None)
        print(f"wheels: {python} installs {wheel.name} and serves with it")
    try_uvx(wheel)
    write_checksums()
    for path in sorted(DIST.iterdir()):
        print(f"wheels: {path.relative_to(ROOT)}")


def is_here(python: str) -> bool:
    """Whether a Python can be started: a name on PATH may be a shim of one that is not installed."""
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        print(f"wheels: no {python} here: not tried with it")
        return False
    return True


def build_sdist() -> Path:
    """Return an sdist. The C library's crate is in it, and in its workspace, from which maturin drops what
    the Python package does not need.
    """
    run([tool("maturin"), "sdist", "--out", str(DIST)], ROOT)
    (made,) = DIST.glob("*.tar.gz")
    mended = io.BytesIO()
    with tarfile.open(made) as old, tarfile.open(fileobj=mended, mode="w:gz") as new:
        for member in old.getmembers():
            held = old.extractfile(member)
            data = b"" if held is None else held.read()
            if member.name.endswith(f"/{WORKSPACE}"):
                data = (ROOT / WORKSPACE).read_bytes()
                member.size = len(data)
            new.addfile(member, io.BytesIO(data) if member.isfile() else None)
    made.write_bytes(mended.getvalue())
    return made


def unpacked(sdist: Path, folder: Path) -> Path:
    """Return the sources of an sdist."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def build_wheel(source: Path, target: str) -> None:
    """Build the wheel of one kind of machine."""
    command = [tool("maturin"), "build", "--release", "--locked", "--zig", "--target", target]
    run([*command, "--compatibility", GLIBC, "--out", str(DIST)], source)


def try_wheel(wheel: Path, python: str, *, sbom: Path | None) -> None:
    """Install a wheel as a user does, and ask it something; ``sbom`` gets what came along with it."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        run([python, "-m", "venv", str(home)], ROOT)
        pip = [str(home / "bin" / "pip"), "install", "--quiet", str(wheel)]
        subprocess.run(pip, env=user_environ(), check=True)
        if sbom is not None:
            report = [tool("cyclonedx-py"), "environment", str(home / "bin" / "python")]
            run([*report, "--output-reproducible", "--output-file", str(sbom)], ROOT)
            sbom.write_text(
                sbom.read_text("utf-8").replace(wheel.parent.as_uri() + "/", ""), encoding="utf-8"
            )
        serve_both([str(home / "bin" / "kvrouter")], Path(folder))


def try_uvx(wheel: Path) -> None:
    """Serve from a wheel by uvx, which installs it into a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environ = user_environ() | {"UV_CACHE_DIR": f"{folder}/cache"}
        command = [tool("uvx"), "--from", str(wheel), "kvrouter"]
        for attempt in ("with an empty cache", "again"):
            began_s = time.monotonic()
            subprocess.run([*command, "--version"], cwd=folder, env=environ, check=True)
            print(
                f"wheels: uvx --from {wheel.name} kvrouter took {time.monotonic() - began_s:.1f} s {attempt}"
            )
        serve_both(command, Path(folder), environ)


def user_environ() -> dict[str, str]:
    """The environment of a user who has neither this repository nor Rust."""
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    folders = environ["PATH"].split(os.pathsep)
    environ["PATH"] = os.pathsep.join(each for each in folders if not (Path(each) / "cargo").exists())
    return environ


def serve_both(command: Sequence[str], folder: Path, environ: dict[str, str] | None = None) -> None:
    """Serve mock engines, and an engine that is known by its URL alone."""
    environ = environ or user_environ()
    serve_one([*command, "up"], "mock", folder, environ)
    with ThreadingHTTPServer(("127.0.0.1", 0), StandInEngine) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_port}"
        took_s = serve_one([*command, "up", "--engine", "vllm", "--url", url], MODEL, folder, environ)
        engine.shutdown()
    print(f"wheels: {command[0]}: from up --url to the first answer {took_s:.1f} s")


MODEL = "stand-in"


class StandInEngine(BaseHTTPRequestHandler):
    """An engine that lists its model as vLLM does, and answers each chat with three tokens."""

    def do_GET(self) -> None:
        """Answer the pages by which an engine is known."""
        model = {"id": MODEL, "root": "/models/none", "owned_by": "vllm", "max_model_len": 1024}
        pages = {"/v1/models": {"object": "list", "data": [model]}, "/version": {"version": "0.32.0"}}
        self._answer(pages.get(self.path))

    def do_POST(self) -> None:
        """Answer a chat; it has no other route."""
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "one two three"}
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
        }
        self._answer(answer if self.path == "/v1/chat/completions" else None)

    def _answer(self, content: object) -> None:
        body = json.dumps(content or {"detail": "Not Found"}).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def serve_one(command: Sequence[str], model: str, folder: Path, environ: dict[str, str]) -> float:
    """Start a command where nothing of this repository is, and have it answer a chat; return the seconds
    until then. Raises RuntimeError when it does not.
    """
    began_s = time.monotonic()
    with subprocess.Popen(
        [*command, "--http-port", "0"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            assert served.stdout is not None
            found = re.search(r"http://\S+(?=/v1)", served.stdout.readline())
            if found is None:
                raise RuntimeError(f"{command} does not say where it serves")
            body = json.dumps(
                {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
            )
            call = urllib.request.Request(
                f"{found[0]}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(call, timeout=READY_S) as answer:
                said = json.loads(answer.read())
            took_s = time.monotonic() - began_s
            with urllib.request.urlopen(f"{found[0]}/ui", timeout=READY_S) as page:
                page.read()
            if said["usage"]["completion_tokens"] != 3:
                raise RuntimeError(f"{command} answered {said}")
            return took_s
        finally:
            served.terminate()
            served.wait(timeout=READY_S)


def write_checksums() -> None:
    """Write the SHA-256 of each file, as ``sha256sum --check`` reads it."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.iterdir())
    ]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def rust_targets() -> set[str]:
    """The kinds of machine that Rust can build for here."""
    library = subprocess.run(
        ["rustc", "--print", "target-libdir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {folder.name for folder in Path(library).parents[1].iterdir() if (folder / "lib").is_dir()}


def tool(name: str) -> str:
    """A program of this Python's environment."""
    return str(Path(sys.executable).parent / name)


def run(command: Sequence[str], folder: Path) -> None:
    """Run a command; its own words are on the terminal."""
    began_s = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, check=True)
    print(f"wheels: {' '.join(command[:3])} took {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
