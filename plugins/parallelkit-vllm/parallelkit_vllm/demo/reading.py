"""Read what a server generates, token by token, as its users do."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from parallelkit.demo.events import Likeliest
from parallelkit.errors import EngineError
from parallelkit_vllm.clients.web import Address

#: Between two lines of a stream: longer than any pause of an update.
_LINE_SECONDS: Final = 120.0


class Reader:
    """Streams completions, one at a time.

    Attributes:
        written: tokens that came so far; gap: the longest time between two of one request.
    """

    def __init__(self, url: str) -> None:
        self._address = Address.of(url)
        self.written = 0
        self.gap = 0.0

    def reset(self) -> None:
        """Count from here on."""
        self.written, self.gap = 0, 0.0

    def complete(self, prompt: Sequence[int], length: int, **sampling: Any) -> Likeliest:
        """Continue token ids by `length` tokens; returns them with their log-probabilities.

        Args:
            sampling: further fields of a request, such as `temperature` and `seed`.

        Raises:
            EngineError: the server refuses, breaks off, or sends nothing for too long.
        """
        body = {
            "model": "demo",
            "prompt": list(prompt),
            "max_tokens": length,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,  # there is no tokenizer to write them
            "stream": True,
            **sampling,
        }
        held = self._address
        connection = http.client.HTTPConnection(held.host, held.port, timeout=_LINE_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(
                    f"a completion got HTTP {response.status}: {response.read(2000)!r}"
                )
            return self._stream(response, length)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise EngineError(f"a completion broke off: {error!r}") from error
        finally:
            connection.close()

    def _stream(self, response: http.client.HTTPResponse, length: int) -> Likeliest:
        tokens: list[int] = []
        logprobs: list[float] = []
        before = None
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise EngineError(f"a completion failed: {event['error']}")
            choice = event["choices"][0] if event["choices"] else {}
            new = choice.get("token_ids")
            if not new:
                continue
            now = time.monotonic()
            if before is not None:
                self.gap = max(self.gap, now - before)
            before = now
            tokens += new
            logprobs += choice["logprobs"]["token_logprobs"]
            self.written += len(new)
        if not len(tokens) == len(logprobs) == length:
            raise EngineError(f"a completion ended after {len(tokens)} of {length} tokens")
        return Likeliest(tokens, logprobs)
