"""Run our kernels under transformers' own Qwen3.5: same weights, same logits, less time on a GPU.

    python examples/kernels_in_qwen3_5.py
    python examples/kernels_in_qwen3_5.py --model PATH_OF_A_QWEN3.5 --tokens 8192

Without --model, a small Qwen3.5 with random weights is made. Our operations run their PyTorch reference on a CPU, so
there the two times only show that nothing breaks; the kernels need a CUDA device.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from tokenmix_core.integrations.transformers import use_kernels

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder or name of a Qwen3.5 (default: a small random one)")
parser.add_argument("--width", type=int, default=512, help="channels of the random model")
parser.add_argument("--layers", type=int, default=8, help="layers of the random model, every fourth one attention")
parser.add_argument("--tokens", type=int, default=1024, help="tokens of a row")
parser.add_argument("--repeats", type=int, default=5, help="timed steps")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
else:
    config = Qwen3_5TextConfig(
        vocab_size=1024,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
model = model.to(device)
tokens = torch.randint(model.config.get_text_config().vocab_size, (1, args.tokens), device=device)


def logits():
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def milliseconds_of_a_training_step():
    model.train()
    times = []
    for _ in range(args.repeats + 1):  # the first step compiles kernels and is not counted
        started = time.perf_counter()
        model(tokens, labels=tokens).loss.backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


expected, before = logits(), milliseconds_of_a_training_step()
with use_kernels(model) as use:  # undone at the end of the block; use_kernels("qwen3_5") serves all Qwen3.5 models
    found, after = logits(), milliseconds_of_a_training_step()
    # decoding uses our kernels, too
    model.eval().generate(tokens[:, :8], attention_mask=torch.ones_like(tokens[:, :8]), max_new_tokens=4)

error = ((found - expected).norm() / expected.norm()).item()
print(f"{use.layers} modules of {model.config.num_hidden_layers} layers run our kernels on {device}")
print(f"logits differ by {error:.1e} (relative, {dtype})")
print(f"forward and backward of {args.tokens} tokens: {before:.0f} ms without, {after:.0f} ms with our kernels")
assert error < (1e-4 if dtype == torch.float32 else 3e-2), "the logits should agree up to rounding"
