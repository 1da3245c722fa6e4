"""Tests of the residual stream between layers; `ModelContract` inherits them and provides the models."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere


class ResidualContract:
    """Tests of the options for hidden states and attention weights, and of hooks on layers.

    Hooks see the tensors that `hidden_states` returns, and may change them.
    """

    inputs: ClassVar[dict]

    def test_hidden_states_are_returned_as_the_configuration_says(self, model, ids):
        expected = model(ids, output_hidden_states=True, **self.inputs).hidden_states
        assert model(ids, **self.inputs).hidden_states is None
        model.config.output_hidden_states = True
        assert model(ids, output_hidden_states=False, **self.inputs).hidden_states is None
        for call in (model, model.model):
            got = call(ids, **self.inputs).hidden_states
            assert len(got) == model.config.num_hidden_layers + 1
            assert all(map(torch.equal, got, expected))
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **self.inputs}
        with graphs_everywhere():
            model.generate(ids, **options)
            cache = model(ids, **self.inputs).cache
            with torch.no_grad(), model.decoding(cache):
                assert len(model(ids[:, :1], cache=cache, **self.inputs).hidden_states) == len(expected)

    def test_attention_weights_are_refused_as_the_configuration_says(self, model, ids):
        model.config.output_attentions = True
        with pytest.raises(ValueError, match="do not form attention weights"):
            model(ids, **self.inputs)

    @torch.no_grad()
    def test_a_hook_on_a_layer_sees_the_stream(self, model, ids):
        plain, layers = model(ids, **self.inputs).logits, list(model.model.layers)
        reported = model(ids, output_hidden_states=True, **self.inputs).hidden_states
        before, after = [], []
        for watched in ([0], [len(layers) - 1], range(len(layers))):
            handles = [layers[i].register_forward_pre_hook(lambda _m, x: before.append(x)) for i in watched]
            handles += [layers[i].register_forward_hook(lambda _m, _x, y: after.append(y[0])) for i in watched]
            assert relative_error(model(ids, **self.inputs).logits, plain) < 1e-4
            for i in watched:
                (x,), y = before.pop(0), after.pop(0)
                assert relative_error(x, reported[i]) < 1e-4
                # the model's last hidden state is taken after the final norm
                y = y if i + 1 < len(layers) else model.model.norm(y)
                assert relative_error(y, reported[i + 1]) < 1e-4
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def test_a_hook_that_replaces_the_stream_is_obeyed(self, model, ids):
        streams = model(ids, output_hidden_states=True, **self.inputs).hidden_states
        for i, layer in enumerate(model.model.layers):
            handle = layer.register_forward_hook(lambda _m, _x, y: (torch.zeros_like(y[0]), *y[1:]))
            changed = model(ids, output_hidden_states=True, **self.inputs).hidden_states
            logits = model(ids, **self.inputs).logits
            handle.remove()
            assert all(map(torch.equal, changed[: i + 1], streams[: i + 1]))
            assert not changed[i + 1].any()
            assert relative_error(logits, model.lm_head(changed[-1])) < 1e-4 or not changed[-1].any()
