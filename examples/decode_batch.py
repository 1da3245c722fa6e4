"""Decode a batch of prompts of unequal lengths with a cache of your own: prefill, then one token at a time.

    python examples/decode_batch.py
    python examples/decode_batch.py --model runs/tiny --prompts "def main(" "import" "class Queue:" --new 40 20 30

Each request has its own number of new tokens; a finished one leaves the batch and its memory. The tokens are those of
`generate`. Without --model, a small hybrid with random weights reads bytes.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder of a model that tokenmix trained (default: a small random one)")
parser.add_argument("--prompts", nargs="+", default=["def main(", "import", "class Queue:"])
parser.add_argument("--new", type=int, nargs="+", default=[12, 5, 9], help="new tokens of each request")
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encode, decode = (lambda text: tokenizer(text)["input_ids"]), tokenizer.decode
else:
    options = {"gated_delta_net": {"num_heads": 2, "head_dim": 32}, "attention": {"num_heads": 4}}
    mixers = ["gated_delta_net", "gated_delta_net", "gated_delta_net", "attention"]
    config = HybridConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4, intermediate_size=256,
                          mixers=mixers, mixer_options=options, initializer_range=0.2)  # fmt: skip
    model = HybridForCausalLM(config)
    encode, decode = (lambda text: list(text.encode())), bytes
device = "cuda" if torch.cuda.is_available() else "cpu"
model = model.eval().to(device)

# Prompts end at the same column: padding is on the left, and the mask is 0 there.
prompts = [encode(text) for text in args.prompts]
longest = max(map(len, prompts))
input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

requests = list(range(len(prompts)))  # the request in each row of the batch
outputs = [[] for _ in requests]
with torch.inference_mode():
    cache = model.make_cache(longest + max(args.new))  # allocates memory for keys and values once
    # Prefill: padding reaches no state, so each row holds its own prompt and nothing else.
    logits = model(input_ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits
    while requests:
        # On CUDA, the steps inside `decoding` replay one CUDA graph until the batch changes; elsewhere it does nothing.
        with model.decoding(cache):
            finished = []
            while not finished:
                tokens = logits[:, -1].argmax(-1)
                for request, token in zip(requests, tokens.tolist(), strict=True):
                    outputs[request].append(token)
                finished = [r for r in requests if len(outputs[r]) == args.new[r]]
                if len(finished) < len(requests):
                    logits = model(tokens.unsqueeze(1), cache=cache).logits
        rows = torch.tensor([i for i, r in enumerate(requests) if r not in finished], device=device)
        requests = [requests[i] for i in rows.tolist()]
        if requests:
            cache.batch_select_indices(rows)
            logits = logits[rows]
            print(f"{len(requests)} requests left, {cache.length} columns, {cache.nbytes:,} bytes in the cache")

expected = model.generate(input_ids, attention_mask=mask, max_new_tokens=max(args.new), do_sample=False, pad_token_id=0)
for text, tokens, generated in zip(args.prompts, outputs, expected[:, longest:].tolist(), strict=True):
    print(f"{text!r} -> {decode(tokens)!r}")
    assert tokens == generated[: len(tokens)], "generate gives other tokens"
