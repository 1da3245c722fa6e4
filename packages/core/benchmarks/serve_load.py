"""Send many requests to a running server: `python serve_load.py http://127.0.0.1:8000 --requests 10000 --pid PID`.

Requests go through the `openai` client. Most are ordinary; one in twenty each is malformed, too long, or left by its
client after .05 seconds. Ordinary requests take the most likely token, so that all answers to one prompt must begin
alike. Prints JSON: answers by status, requests a second, and, with `--pid`, MiB of the server's memory after a tenth of
the requests and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import time
from pathlib import Path

import httpx
import openai

MALFORMED = ({"temperature": "hot"}, {"prompt": {}}, {"n": 0}, {"stop": [""]}, {"model": "other"})


def memory(pid: int | None) -> float | None:
    """Return the MiB of a process that are in memory."""
    if pid is None:
        return None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Load:
    """Requests to one server, and counts of the answers by kind of request and status."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self.client, self.model, self.rng = client, model, random.Random(0)
        self.seen = collections.Counter(wrong=0)
        self.texts: dict[str, str] = {}

    async def ask(self) -> None:
        """Send one request and count its answer."""
        kind = self.rng.choices(("ordinary", "malformed", "long", "left"), (17, 1, 1, 1))[0]
        prompt, tokens = "x" * self.rng.randint(1, 60), self.rng.randint(1, 24)
        stream, extra = self.rng.random() < 0.3, self.rng.choice(MALFORMED) if kind == "malformed" else {}
        wanted = {"ordinary": (200,), "malformed": (400, 404), "long": (400,), "left": (200, "left")}[kind]
        try:
            text = await self.complete(
                model=self.model,
                prompt="x" * 100_000 if kind == "long" else prompt,
                max_tokens=tokens,
                temperature=0,
                stream=stream,
                extra_body=extra,
                timeout=0.05 if kind == "left" else 600,
            )
            status: int | str = 200 if self.agrees(prompt, text) else "another text"
        except openai.APITimeoutError:
            status = "left" if kind == "left" else "timeout"
        except openai.APIStatusError as error:
            status = error.status_code if "\n" not in error.message else "several lines"
        self.seen[f"{kind}: {status}"] += 1
        self.seen["wrong"] += status not in wanted

    async def complete(self, **body) -> str:
        """Return the text of a completion, which ends with a reason."""
        made = await self.client.completions.create(**body)
        if not body["stream"]:
            assert made.choices[0].finish_reason
            return made.choices[0].text
        choices = [event.choices[0] async for event in made]
        assert choices[-1].finish_reason
        return "".join(choice.text for choice in choices)

    def agrees(self, prompt: str, text: str) -> bool:
        """Return whether a text and the longest earlier one of its prompt begin alike."""
        # a text may end within a character
        text, longest = text.rstrip("\ufffd"), self.texts.get(prompt, "")
        self.texts[prompt] = max(text, longest, key=len)
        return text.startswith(longest) or longest.startswith(text)


async def run(url: str, requests: int, together: int, pid: int | None) -> dict:
    """Send all requests, `together` at a time; return the counts, speed and memory to print."""
    limits, left, early = httpx.Limits(max_connections=together), iter(range(requests)), None
    start = time.perf_counter()
    async with httpx.AsyncClient(limits=limits) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        load = Load(client, (await client.models.list()).data[0].id)

        async def work() -> None:
            nonlocal early
            for i in left:
                await load.ask()
                if i == requests // 10:
                    early = memory(pid)

        await asyncio.gather(*(work() for _ in range(together)))
        seconds = time.perf_counter() - start
        metrics = (await http.get(f"{url}/metrics")).text
    active = [line for line in metrics.splitlines() if line.startswith("tokenmix_requests_active")]
    memories = {"early_mib": early, "end_mib": memory(pid)}
    return {"answers": dict(load.seen), "requests_a_second": round(requests / seconds, 1), **memories, "active": active}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--together", type=int, default=64)
    parser.add_argument("--pid", type=int)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args.url, args.requests, args.together, args.pid))))


if __name__ == "__main__":
    main()
