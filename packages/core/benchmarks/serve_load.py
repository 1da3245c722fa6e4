"""Send many requests to a running server: `python serve_load.py http://127.0.0.1:8000 --requests 10000 --pid PID`.

Most requests are ordinary; one in twenty each is malformed, too long, or left by its client after .05 seconds. Prints
JSON: answers by status, requests a second, and, with `--pid`, MiB of the server's memory after a tenth of the requests
and at the end.
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


def memory(pid: int | None) -> float | None:
    """MiB of a process that are in memory."""
    if pid is None:
        return None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def ask(client: httpx.AsyncClient, rng: random.Random, seen: collections.Counter) -> None:
    """Send one request, and count the kind of its answer."""
    kind = rng.choices(("ordinary", "malformed", "long", "left"), (17, 1, 1, 1))[0]
    body: dict = {"prompt": "x" * rng.randint(1, 60), "max_tokens": rng.randint(1, 24), "stream": rng.random() < 0.3}
    if kind == "malformed":
        body |= rng.choice(({"temperature": "hot"}, {"prompt": {}}, {"n": 0}, {"stop": [""]}, {"model": "other"}))
    elif kind == "long":
        body["prompt"] = "x" * 100_000
    wanted = {"ordinary": (200,), "malformed": (400, 404), "long": (400,), "left": (200, "left")}[kind]
    try:
        made = await client.post("/v1/completions", json=body, timeout=0.05 if kind == "left" else 600)
        status: int | str = made.status_code
        if status == 200 and body["stream"]:
            assert made.text.endswith("data: [DONE]\n\n")
        elif status == 200:
            assert made.json()["choices"][0]["finish_reason"]
        else:
            assert "\n" not in made.json()["error"]["message"]
    except httpx.TimeoutException:
        status = "left" if kind == "left" else "timeout"
    seen[f"{kind}: {status}"] += 1
    seen["wrong"] += status not in wanted


async def load(url: str, requests: int, together: int, pid: int | None) -> dict:
    """Send all requests, `together` at a time."""
    rng, seen, start = random.Random(0), collections.Counter(wrong=0), time.perf_counter()
    left = iter(range(requests))
    early = memory(pid)
    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:

        async def work() -> None:
            nonlocal early
            for i in left:
                await ask(client, rng, seen)
                if i == requests // 10:
                    early = memory(pid)

        await asyncio.gather(*(work() for _ in range(together)))
        seconds = time.perf_counter() - start
        metrics = (await client.get("/metrics")).text
    active = [line for line in metrics.splitlines() if line.startswith("tokenmix_requests_active")]
    memories = {"early_mib": early, "end_mib": memory(pid)}
    return {"answers": dict(seen), "requests_a_second": round(requests / seconds, 1), **memories, "active": active}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--together", type=int, default=64)
    parser.add_argument("--pid", type=int)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(load(args.url, args.requests, args.together, args.pid))))


if __name__ == "__main__":
    main()
