"""Requests in slots of a pool of bytes, as vLLM stores them, decode as on states of their own; vLLM is not needed."""

from __future__ import annotations

import torch

from tokenmix_core.integrations.vllm.states import SLOT_DTYPE, slot_elements, slot_layouts
from tokenmix_core.nn import Span
from tokenmix_core.testing.closeness import relative_error
from tokenmix_nats_l import NatsLConfig
from tokenmix_nats_l.mixer import NatsL

OPTIONS = {"num_heads": 2, "head_dim": 16, "num_softmax_heads": 4}
LENGTH = 320
# by slot: counts of tokens of the calls that compute its prompt
PROMPTS = {4: (1,), 2: (63, 64, 90), 5: (150,)}


def run(mixer, x, state, span):
    state.span = span
    return mixer(x, state=state)[0]


@torch.no_grad()
def test_heads_retain_chunks_in_pages_of_a_slot():
    torch.manual_seed(0)
    config = NatsLConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, intermediate_size=8, mixer_options={"nats_l": OPTIONS}
    )
    layout = slot_layouts(config, ["nats_l"], LENGTH, torch.float32)["nats_l"]
    mixer, steps = NatsL(32, **OPTIONS).eval(), 100
    x = {slot: torch.randn(1, sum(parts) + steps, 32) for slot, parts in PROMPTS.items()}
    expected, states = {}, {}
    pool = torch.full((7, slot_elements({"": layout})), -1, dtype=SLOT_DTYPE)
    views = layout.views(pool)
    for slot, parts in PROMPTS.items():
        at, wanted = 0, mixer.make_state()
        for n in parts:
            call, span = x[slot][:, at : at + n], Span(1, n, x[slot].device, past=at)
            index = torch.tensor([slot])
            state = layout.gather(views, index) if at else layout.empty()
            got = run(mixer, call, state, span)
            layout.scatter(state, views, index)
            assert relative_error(got, run(mixer, call, wanted, span)) < 1e-5
            at += n
        mixer.prepare_steps(wanted)
        expected[slot], states[slot] = wanted, at
    others = pool[[0, 1, 3, 6]].clone()
    slots = torch.tensor(list(PROMPTS))
    for _ in range(steps):
        before = torch.tensor(list(states.values()))
        span = Span(len(slots), 1, slots.device, past=LENGTH - 1, lengths=before, known=before.tolist)
        token = torch.cat([x[slot][:, at : at + 1] for slot, at in states.items()])
        state = layout.in_slots(views, slots, constant=False, padded=slots.int())
        got = run(mixer, token, state, span)
        layout.scatter(state, views, slots)
        for row, (slot, at) in enumerate(states.items()):
            wanted = run(mixer, token[row : row + 1], expected[slot], Span(1, 1, slots.device, past=at))
            assert relative_error(got[row : row + 1], wanted) < 1e-5, (slot, at)
            states[slot] = at + 1
    lengths = views["kept"][3][slots]
    assert torch.equal(lengths, torch.cat([x.kept.lengths for x in expected.values()]))
    assert len(lengths.unique()) > 1
    assert torch.equal(pool[[0, 1, 3, 6]], others)
