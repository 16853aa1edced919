"""Who asks about a text tells nobody else of which model, and does not wait for others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def called() -> Iterator[tuple[dict[str, str], threading.Event]]:
    """An environment in which all HTTP goes to this process, and whether anything came."""
    came = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                came.set()
                connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "VLLM_"))}
        env |= dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), here)
        yield env, came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def ask(text: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvvault.cli", "prompts", "find", "--tenant", "acme"]
    command += ["--vault", str(text.parent / "v"), "--model", "somebody/model"]
    command += ["--text-file", str(text)]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_model_s_name_is_not_asked_for_anywhere(
    tmp_path: Path, called: tuple[dict[str, str], threading.Event]
) -> None:
    env, came = called
    text = tmp_path / "text"
    text.write_text("a question")
    with ask(text, env) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "--tokenizer" in errors
    assert not came.is_set()
    # Told to, it does ask: somebody would have heard it.
    with ask(text, env | {"HF_HUB_OFFLINE": "0"}) as process:
        try:
            assert came.wait(300)
        finally:
            process.kill()
