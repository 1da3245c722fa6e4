"""Call two operations directly on packed documents, forward and backward, and compare with each document alone.

    python examples/packed_documents.py
    python examples/packed_documents.py --lengths 500 3000 12 800 --heads 16 --head-dim 128

Documents of unequal lengths lie one after the other in one row, without padding. `cu_seqlens` holds their boundaries:
0, the end of the first document, ..., the number of tokens. No document sees another one.
"""

import argparse

import torch

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import attention, chunk_gated_delta_rule, explain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--lengths", type=int, nargs="+", default=[70, 200, 3, 129], help="tokens of each document")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--head-dim", type=int, default=64)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
T, H, D = sum(args.lengths), args.heads, args.head_dim
cu_seqlens = cu_seqlens_from_lengths(torch.tensor(args.lengths, device=device))
print(f"{len(args.lengths)} documents, {T} tokens, cu_seqlens {cu_seqlens.tolist()}")

q, k, v, do = (torch.randn(1, T, H, D, device=device, dtype=dtype) for _ in range(4))
g = -torch.rand(1, T, H, device=device)  # log-decays, at most 0
beta = torch.rand(1, T, H, device=device)  # write strengths


def gated_delta_rule(q, k, v, g, beta, cu_seqlens=None):
    # also returns the state after each document, [documents, heads, D, D], from which each one could go on
    return chunk_gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, cu_seqlens=cu_seqlens)


def windowed_attention(q, k, v, cu_seqlens=None):
    # also returns the log-sum-exp of the scores; `sinks` keeps the first tokens of each document visible
    return attention(q, k, v, window=64, sinks=4, cu_seqlens=cu_seqlens)


def output_and_gradients(op, inputs, do, cu_seqlens=None):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = op(*inputs, cu_seqlens=cu_seqlens)[0]
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


for op, inputs, names in (
    (gated_delta_rule, (q, k, v, g, beta), ("o", "dq", "dk", "dv", "dg", "dbeta")),
    (windowed_attention, (q, k, v), ("o", "dq", "dk", "dv")),
):
    packed = output_and_gradients(op, inputs, do, cu_seqlens)
    alone = [
        output_and_gradients(op, document[:-1], document[-1])
        for document in zip(*(x.split(args.lengths, dim=1) for x in (*inputs, do)), strict=True)
    ]
    print(op.__name__)
    for i, name in enumerate(names):
        expected = torch.cat([document[i] for document in alone], dim=1)
        error = ((packed[i] - expected).norm() / expected.norm()).item()
        print(f"  {name:5} differs by {error:.1e} (relative) from each document alone")
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)

o, states = gated_delta_rule(q, k, v, g, beta, cu_seqlens)
print(f"the states after each document: {list(states.shape)}")
print(explain("chunk_gated_delta_rule"))
