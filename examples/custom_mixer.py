"""Write a mixer of your own, put it into a hybrid beside attention, train the hybrid and generate from it.

    python examples/custom_mixer.py

The mixer is gated linear attention: each head keeps a matrix S, S_t = e^{g_t} S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, and
the token decides its decay e^{g_t}. The model learns two sentences by heart, in ten seconds on a CPU.
docs/custom_mixer.md explains each method.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, LayerState, Mixer, TensorState, register_mixer
from tokenmix_core.ops import chunk_ssd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=120, help="training steps")
args = parser.parse_args()


class GatedLinearAttention(Mixer):
    def __init__(self, hidden_size, *, num_heads=2, norm_eps=1e-6):
        super().__init__()
        self.heads = (num_heads, hidden_size // num_heads)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def make_state(self):  # the state that generation carries: one matrix for each head
        return LayerState(recurrent=TensorState(*self.heads, self.heads[1], dtype=torch.float32))

    def forward(self, x, *, state=None, cu_seqlens=None, rotary=None):
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, *self.heads)).unbind(-3)
        g = logsigmoid(self.gate_proj(x) + 4)  # the decay is near 1 at first
        before = None if state is None else state.recurrent.value  # None before the first token
        o, after = chunk_ssd(q, k, v, g, scale=self.heads[1] ** -0.5, initial_state=before, cu_seqlens=cu_seqlens)
        if state is not None:
            state.recurrent.set(after)
        return self.o_proj(o.flatten(-2)), None

    def mixing_flops(self, seq_len):  # FLOPs of a token, without the linear layers
        return 4.0 * self.heads[0] * self.heads[1] ** 2


register_mixer("my_linear_attention", GatedLinearAttention)
config = HybridConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    intermediate_size=128,
    mixers=["my_linear_attention", "attention"],  # repeated over the four layers
    mixer_options={"my_linear_attention": {"num_heads": 2}, "attention": {"num_heads": 2, "window": 16}},
)
torch.manual_seed(0)
model = HybridForCausalLM(config)

first = b"A recurrent state has one size for every text. "
second = b"The cache of attention grows with each token. "
tokens = torch.tensor([*first, *second]).unsqueeze(0)  # packed: one row, two documents that do not see each other
cu_seqlens = torch.tensor([0, len(first), tokens.shape[1]])

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(args.steps):
    loss = model(tokens, labels=tokens, cu_seqlens=cu_seqlens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0 or step == args.steps - 1:
        print(f"step {step}: loss {loss.item():.3f} nats per token")

model.eval()
prompt = tokens[:, :12]
options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": len(first) - 12, "do_sample": False}
generated = model.generate(prompt, **options)
print(bytes(generated[0].tolist()))
# the state replaces all past tokens: generation without a cache, which reads them again, gives the same text
assert torch.equal(generated, model.generate(prompt, use_cache=False, **options))
