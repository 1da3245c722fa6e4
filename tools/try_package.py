"""Use one installed package: `python try_package.py MODULE` imports all of it, and runs a tiny model of each mixer.

It is a program because the environments in which it runs, those of the nox sessions `wheels` and `newest`, have one
package and no test tools.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_heads": 2, "head_dim": 16}
# by module: the prefix of its classes, and its mixers with their options
MODELS = {
    "tokenmix_core": ("Hybrid", {"gated_delta_net": HEADS, "mamba2": {"head_dim": 16}, "attention": {"num_heads": 2}}),
    "tokenmix_lte": ("Lte", {"lte": {"num_heads": 2, "window": 16, "cap": 8}}),
    "tokenmix_nats_l": ("NatsL", {"nats_l": HEADS | {"num_softmax_heads": 2}}),
    "tokenmix_nha": ("Nha", {"nha": {"num_heads": 2, "slots": 8, "window": 8}}),
    "tokenmix_oryx": ("Oryx", {"oryx": {"linear_mixer": "gated_delta_net", "num_heads": 2}}),
}


def import_all(module: str) -> None:
    """Import every module at the top of the package except `testing`, which needs an extra."""
    package = importlib.import_module(module)
    for info in pkgutil.iter_modules(package.__path__, f"{module}."):
        if info.name != f"{module}.testing":
            importlib.import_module(info.name)
    import torch

    assert not torch.cuda.is_initialized(), "importing the package initialises CUDA"


def try_model(module: str, mixer: str, options: dict) -> None:
    """Train for 20 steps; generate with and without cache, before and after saving, and compare the tokens."""
    import torch

    prefix = MODELS[module][0]
    package = importlib.import_module(f"{module}.modeling" if module == "tokenmix_core" else module)
    config = getattr(package, f"{prefix}Config")(**SIZES, mixers=[mixer], mixer_options={mixer: options})
    torch.manual_seed(0)
    model = getattr(package, f"{prefix}ForCausalLM")(config)
    ids = torch.arange(40).remainder(8).expand(2, -1) + 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], f"{mixer}: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder)
    wanted = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = [x.generate(ids, use_cache=cached, **wanted) for x in (model, again) for cached in (True, False)]
    assert tokens[0].shape == (2, 48)
    assert all(torch.equal(x, tokens[0]) for x in tokens), f"{mixer}: generation depends on the cache or on saving"
    print(f"{mixer}: the loss went from {losses[0]:.2f} to {losses[-1]:.2f}, and it generates")


def main() -> None:
    """Try the package that the command line names."""
    module = sys.argv[1]
    import_all(module)
    for mixer, options in MODELS[module][1].items():
        try_model(module, mixer, options)


if __name__ == "__main__":
    main()
