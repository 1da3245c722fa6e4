"""Train a hybrid of Gated DeltaNet and attention on a folder of your own text, then generate from it.

    python examples/train_on_your_text.py my-text --out runs/my-text

`my-text` is a folder of .txt, .md, .py, ... files, of JSONL files or of parquet files. The tokenizer takes one byte for
one token. 400,000 tokens take about two minutes on two CPU cores; on a GPU, increase --width, --layers and --tokens.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tokenmix_core.modeling  # noqa: F401  (transformers' auto classes then know our models)
from tokenmix_core.data.prepare import prepare
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_core.training.trainer import train

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", help="folder of text files")
parser.add_argument("--out", type=Path, default=Path("runs/my-text"), help="new folder: tokens, model and log")
parser.add_argument("--width", type=int, default=128, help="channels of the hidden states")
parser.add_argument("--layers", type=int, default=4, help="three Gated DeltaNet layers, then one of attention, ...")
parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
parser.add_argument("--tokens", type=int, default=400_000, help="tokens to train on")
parser.add_argument("--prompt", default="It was ", help="beginning of the generated text")
args = parser.parse_args()

# 1. Tokens. The folder becomes one file of tokens; 5 % of the documents are held out for evaluations.
data = args.out / "tokens"
meta = prepare(args.text, data, tokenizer="bytes", held_out=0.05, progress=False)
print(f"{meta.documents} documents, {meta.tokens:,} tokens, vocabulary {meta.vocab_size}")

# 2. The recipe: a frozen dataclass with everything the run depends on. `dataclasses.replace` makes variants.
heads = args.width // 64
batch = 8 * args.seq_len
recipe = Recipe(
    name="my-text",
    description="a hybrid on my own text",
    model={
        "vocab_size": 264,  # 256 bytes and 3 special tokens, rounded up to a multiple of 8
        "hidden_size": args.width,
        "num_hidden_layers": args.layers,
        "intermediate_size": 3 * args.width,
        "mixers": ["gated_delta_net"] * 3 + ["attention"],  # repeated over the layers
        "mixer_options": {
            "gated_delta_net": {"num_heads": heads, "head_dim": 64, "expand_v": 1.0},
            "attention": {"num_heads": heads},
        },
        "max_position_embeddings": args.seq_len,
    },
    data=DataRecipe(sources=[str(data)], tokenizer="bytes", seq_len=args.seq_len, documents="joined"),
    optimizer=OptimizerRecipe(
        total_tokens=Tokens(args.tokens),
        warmup_tokens=Tokens(args.tokens // 10),
        batch_tokens=Tokens(batch),
        micro_batch_tokens=Tokens(batch),
        learning_rate=4e-3,
        min_learning_rate=2e-4,
    ),
    run=RunRecipe(logging_steps=10, save_steps=200),
)

# 3. Train. The folder gets the model in transformers' format, its tokenizer, checkpoints and metrics.jsonl.
result = train(recipe, args.out / "model", progress=False)
print(f"{result.step} steps in {result.seconds:.0f} s, training loss {result.loss:.2f} nats per token")

# 4. Sample. The saved folder is an ordinary model of transformers.
tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
model = AutoModelForCausalLM.from_pretrained(result.model_dir).eval()
torch.manual_seed(0)
prompt = tokenizer(args.prompt, return_tensors="pt")
options = {"do_sample": True, "temperature": 0.7, "pad_token_id": meta.eos_token_id}
tokens = model.generate(**prompt, max_new_tokens=args.seq_len - prompt["input_ids"].shape[1], **options)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
