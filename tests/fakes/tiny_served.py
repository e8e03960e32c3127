"""A tiny random model behind a real daemon, and clients that keep it busy."""

import http.client
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fakes.tiny import prepare_tiny, write_tiny
from tests.served import Served

MODEL = "tiny"


def tiny_model(directory: Path) -> Path:
    """Large enough that a step takes milliseconds, small enough to be written in one."""
    model = write_tiny(
        "llama", directory, hidden_size=256, intermediate_size=512, num_hidden_layers=4, max_position_embeddings=1024
    )
    prepare_tiny(directory, model)
    return directory


def tiny_served(directory: Path, *args: str, env: dict[str, str] | None = None) -> Served:
    """A daemon, not started yet, that serves such a model as 'tiny'."""
    model = tiny_model(directory / "model")
    return Served(directory, str(model), "--served-model-name", MODEL, "--memory-limit", "600MiB", *args, env=env)


class Load:
    """`clients` threads that ask for one completion after the other until the `with` ends; refusals are fine."""

    def __init__(self, served: Served, clients: int, prompt: str, tokens: int) -> None:
        self._served, self._tokens, self._prompt = served, tokens, prompt
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(clients)]
        self.answered = 0

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            body: dict[str, Any] = {
                "model": MODEL,
                "prompt": f"{self._prompt} {number % 3}",
                "max_tokens": self._tokens + 7 * (number % 5),
                "ignore_eos": True,
                "seed": number,
            }
            try:
                status, _ = self._served.post("/v1/completions", body)
            except (OSError, ValueError, http.client.HTTPException):
                status = 0
            if status == 200:
                self.answered += 1
            else:
                self._over.wait(0.2)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
