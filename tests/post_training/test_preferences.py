"""DPO, GRPO, RLOO and reward models: the values of the first step follow from plain formulas."""

import math

import pytest
import torch
from datasets import Dataset
from tests.post_training.models import LTE, build
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from tokenmix_core.integrations import count_auxiliary_losses

PROMPTS = ["say something: ", "and now for a longer prompt: ", "x", "tell me: "]
PAIRS = [{"prompt": p, "chosen": p[::-1], "rejected": "no, never, not at all"} for p in PROMPTS]
# calls in training must see the same keys as generation, and the reference
CAPPED = {"mixer_options": {"lte": LTE | {"train_capped": True}}}

pytestmark = pytest.mark.filterwarnings("ignore:.*computes its own loss")


@pytest.fixture
def folder(mixer, tmp_path):
    """Return the folder of a saved model, from which trainers load policy and reference."""
    build(mixer, **(CAPPED if mixer == "lte" else {})).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def logged(trainer, name="loss"):
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def dpo(folder, settings, tokenizer, trainer=DPOTrainer):
    return trainer(
        folder, args=DPOConfig(**settings), train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer
    )


def test_the_first_loss_of_dpo_is_the_logarithm_of_two(mixer, folder, settings, tokenizer):
    losses = logged(dpo(folder, settings, tokenizer))
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("mixer", ["nats_l"])
def test_the_first_loss_of_dpo_with_auxiliary_losses_is_their_mean_more(mixer, folder, settings, tokenizer):
    found = []

    class Watched(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            out = model.model(inputs["input_ids"], inputs["attention_mask"], losses_counted=True)
            found.append(out.auxiliary["budget_loss"].sum().item() / inputs["attention_mask"].sum().item())
            return super().compute_loss(model, inputs, *args, **kwargs)

    losses = logged(dpo(folder, settings, tokenizer, count_auxiliary_losses(Watched)))
    assert losses[0] == pytest.approx(math.log(2) + found[0], abs=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["alone", "reference"])
def test_grpo_samples_with_the_log_probabilities_that_it_trains_on(mixer, beta, folder, settings, tokenizer):
    seen, scores = {}, iter(range(100))

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.update(out := super()._generate_and_score_completions(inputs))
            return out

    args = GRPOConfig(**settings, beta=beta, max_completion_length=12, num_generations=2, num_iterations=2)
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = Watched(
        folder,
        lambda completions, **_: [float(next(scores)) for _ in completions],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    old, mask = seen["old_per_token_logps"], seen["completion_mask"].bool()
    # the log-probabilities with which generation's own forward calls, with a cache, would sample the tokens
    policy = type(trainer.model).from_pretrained(folder).eval()
    for i in range(len(old)):
        prompt = seen["prompt_ids"][i][seen["prompt_mask"][i].bool()]
        completion = seen["completion_ids"][i][mask[i]]
        cache, found, feed = policy.make_cache(), [], prompt[None]
        for token in completion:
            with torch.no_grad():
                logits = policy(input_ids=feed, cache=cache, use_cache=True).logits[0, -1]
            found.append(logits.log_softmax(-1)[token])
            feed = token.view(1, 1)
        torch.testing.assert_close(old[i][mask[i]], torch.stack(found), atol=2e-5, rtol=0)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    # no clipping at ratio 1; advantages of a group sum to zero
    assert history[0]["loss"] == pytest.approx(0, abs=1e-6)
    assert history[0]["clip_ratio/region_mean"] == 0
    if beta:
        assert history[0]["kl"] == pytest.approx(0, abs=1e-7)
        assert history[1]["kl"] > 0


def test_the_first_loss_of_a_reward_model_is_that_of_its_own_scores(mixer, settings, tokenizer):
    def model():
        return build(mixer, "SequenceClassification", num_labels=1)

    args = RewardConfig(**settings | {"per_device_train_batch_size": 4})
    losses = logged(RewardTrainer(model(), args, train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer))
    margins = []
    for pair in PAIRS:
        texts = [pair["prompt"] + pair[name] + tokenizer.eos_token for name in ("chosen", "rejected")]
        scores = [model().train()(input_ids=tokenizer(t, return_tensors="pt").input_ids).logits.item() for t in texts]
        margins.append(scores[0] - scores[1])
    expected = -torch.nn.functional.logsigmoid(torch.tensor(margins)).mean().item()
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[1] < losses[0]


def test_rloo_starts_at_its_reference_and_leaves_it(mixer, folder, settings, tokenizer):
    scores = iter(range(100))
    trainer = RLOOTrainer(
        folder,
        lambda completions, **_: [float(next(scores)) for _ in completions],
        args=RLOOConfig(**settings, beta=0.1, max_completion_length=12, num_generations=2),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer,
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    # the ratio to the sampling policy is 1, and advantages of a prompt's completions sum to zero
    assert history[0]["loss"] == pytest.approx(0, abs=1e-5)
    assert history[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert abs(history[1]["kl"]) > 1e-5
