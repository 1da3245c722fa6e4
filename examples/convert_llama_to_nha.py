"""Give a Llama the layers of Native Hybrid Attention (NHA), finetune its attention, and compare the losses.

    python examples/convert_llama_to_nha.py
    python examples/convert_llama_to_nha.py --model models/Llama-3.2-1B --source data/slimpajama --tokens 100000000

All weights of the Llama stay. In three layers of four, memory slots and a window replace the cache of all keys; every
fourth layer still sees everything. Without --model, a small Llama is trained first.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.perplexity import cut_sequences, loss_by_position
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_core.training.trainer import train
from tokenmix_nha import convert
from tokenmix_nha.finetune import finetune

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", type=Path, help="folder of a Llama, Qwen2 or Qwen3 (default: train a small Llama)")
parser.add_argument("--source", default="stdlib", help="stdlib (built in), or a folder made by `tokenmix data prepare`")
parser.add_argument("--out", type=Path, default=Path("runs/nha"), help="new folder for all models")
parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
parser.add_argument("--tokens", type=int, default=200_000, help="tokens of each training")
parser.add_argument("--slots", type=int, default=16, help="memory slots of each key head")
parser.add_argument("--window", type=int, default=16, help="tokens that a layer with slots sees exactly")
parser.add_argument("--width", type=int, default=128, help="channels of the small Llama")
args = parser.parse_args()

optimizer = OptimizerRecipe(
    total_tokens=Tokens(args.tokens),
    warmup_tokens=Tokens(args.tokens // 10),
    batch_tokens=Tokens(8 * args.seq_len),
    micro_batch_tokens=Tokens(8 * args.seq_len),
    learning_rate=2e-3,
    min_learning_rate=2e-4,
)
data = DataRecipe(sources=[args.source], tokenizer="bytes", seq_len=args.seq_len, documents="joined")
run = RunRecipe(logging_steps=10)

# 1. The Llama, as transformers has it.
folder = args.model
if folder is None:
    folder = args.out / "llama"
    sizes = {"hidden_size": args.width, "num_hidden_layers": 4, "intermediate_size": 3 * args.width}
    fields = {"vocab_size": 264, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    train(Recipe("llama", "a small Llama", fields, "llama", data, optimizer, run), folder, progress=False)
tokenizer = AutoTokenizer.from_pretrained(folder)
held_out = text.text_tokens(None if args.source == "stdlib" else args.source, tokenizer, 256 * args.seq_len)
sequences = cut_sequences(held_out, args.seq_len, limit=32)


def report(name, model):
    nats = loss_by_position(model.eval(), sequences, progress=False).mean()
    print(f"{name:10} held-out loss {nats:.3f} nats per token")


llama = AutoModelForCausalLM.from_pretrained(folder)
report("Llama", llama)

# 2. Convert. The gates of the slots begin as averages of the key projections; everything else is the Llama's.
windows = ["full" if i % 4 == 3 else args.window for i in range(llama.config.num_hidden_layers)]
converted = convert(llama, windows, slots=args.slots)
converted.save_pretrained(args.out / "converted")
tokenizer.save_pretrained(args.out / "converted")
report("converted", converted)
print(f"cache of 32,768 tokens: {converted.state_bytes(2**15, 1, torch.bfloat16):,} bytes, all layers full: "
      f"{convert(llama, 'full', slots=0).state_bytes(2**15, 1, torch.bfloat16):,} bytes")  # fmt: skip

# 3. Finetune, stage 1 of the paper: attention learns, all else is frozen. Stage 2 is LoRA on everything (needs peft).
recipe = finetune(str(args.out / "converted"), stage=1)
data = replace(recipe.data, sources=[args.source], seq_len=args.seq_len)
result = train(replace(recipe, data=data, optimizer=optimizer, run=run), args.out / "finetuned", progress=False)
report("finetuned", AutoModelForCausalLM.from_pretrained(result.model_dir))
