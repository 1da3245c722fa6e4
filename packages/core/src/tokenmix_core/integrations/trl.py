"""Subclasses of TRL's trainers whose loss includes the mixers' auxiliary losses."""

from __future__ import annotations

from typing import Any

from tokenmix_core.modeling import collected_losses


def count_auxiliary_losses(trainer: type) -> Any:
    """Return a subclass of a trainer whose loss includes the mixers' auxiliary losses.

    TRL computes log-probabilities from the backbone's hidden states, and so drops these losses. The subclass adds their
    sums over tokens, divided by `num_items_in_batch` if the trainer counts labels (SFT; the result equals the loss that
    the model itself computes), else by the number of tokens in the model's calls (DPO, GRPO, rewards).

    Args:
        trainer: a subclass of transformers' Trainer, such as TRL's `SFTTrainer`, `DPOTrainer` or `GRPOTrainer`.
    """

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with collected_losses(model) as found:
            result = base.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if not found:
            return result
        total = sum(loss.total for loss in found)
        if num_items_in_batch is None:
            more = total / sum(loss.tokens for loss in found)
            # divide, as these trainers divide their own loss, by the number of accumulation steps
            if self.compute_loss_func is not None:
                more = more / self.current_gradient_accumulation_steps
        else:
            more = total / num_items_in_batch
            if self.args.average_tokens_across_devices:
                more = more * (self.accelerator.num_processes // self.get_tp_size())
        return (result[0] + more, result[1]) if return_outputs else result + more

    base: Any = trainer
    return type(f"{trainer.__name__}WithAuxiliaryLosses", (trainer,), {"compute_loss": compute_loss})
