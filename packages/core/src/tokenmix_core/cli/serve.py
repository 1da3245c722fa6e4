"""`tokenmix serve`: an OpenAI-compatible server for a trained model."""

from __future__ import annotations

import argparse
import signal
import socket
from pathlib import Path

from tokenmix_core._utils.optional import require
from tokenmix_core.cli.commands import Context, device_and_dtype, load_model, load_tokenizer

# seconds that running requests get to end after SIGTERM; seconds until an idle connection is closed: more than clients
# keep a connection open, so that no client sends a request while the server closes its connection
_GRACE, _IDLE = 30, 75


def serve(args: argparse.Namespace, context: Context) -> None:
    """Answer requests to OpenAI's API until the process is stopped."""
    uvicorn = require("uvicorn", "serve")
    require("fastapi", "serve")
    from transformers import ContinuousBatchingConfig

    from tokenmix_core.serving import Engine, build_app

    for name in ("max_model_len", "max_requests", "max_waiting", "max_batch_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.prefix_cache < 0:
        raise ValueError(f"--prefix-cache must be at least 0 bytes, got {args.prefix_cache}")
    name = args.name or Path(args.checkpoint).resolve().name
    pool = ContinuousBatchingConfig(max_requests_per_batch=args.max_requests, max_batch_tokens=args.max_batch_tokens)
    # bind the port first: a port in use is then reported before the model is loaded
    with socket.create_server((args.host, args.port)) as listening:
        device, dtype = device_and_dtype(args.device, args.dtype)
        model, tokenizer = load_model(args.checkpoint, device, dtype), load_tokenizer(args.checkpoint)
        host, port = listening.getsockname()[:2]
        reach = "only this machine can reach it" if host.startswith("127.") else "other machines can reach it"
        # ignore SIGTERM in this process: uvicorn handles it, shuts down, and then raises it again
        signal.signal(signal.SIGTERM, lambda *_: None)
        with context.using(model, args):
            length = args.max_model_len or model.config.max_position_embeddings
            engine = Engine(model, pool, length, prefix_bytes=args.prefix_cache)
            app = build_app(engine, tokenizer, name, args.max_waiting)
            print(f"serving {name} at http://{host}:{port}/v1 ({reach}); Ctrl-C stops it", flush=True)
            settings = uvicorn.Config(
                app, log_level="warning", timeout_keep_alive=_IDLE, timeout_graceful_shutdown=_GRACE
            )
            uvicorn.Server(settings).run(sockets=[listening])
