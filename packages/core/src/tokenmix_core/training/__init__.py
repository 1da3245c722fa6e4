"""Training: recipes, data in a reproducible order, the Trainer, checkpoints that resume exactly, callbacks."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.training.baselines import ATTENTION as ATTENTION
    from tokenmix_core.training.baselines import BASELINES as BASELINES
    from tokenmix_core.training.baselines import BYTE_VOCAB as BYTE_VOCAB
    from tokenmix_core.training.baselines import GDN as GDN
    from tokenmix_core.training.baselines import LLAMA2 as LLAMA2
    from tokenmix_core.training.baselines import LLAMA2_VOCAB as LLAMA2_VOCAB
    from tokenmix_core.training.baselines import MAMBA2 as MAMBA2
    from tokenmix_core.training.baselines import SIZES as SIZES
    from tokenmix_core.training.baselines import baseline as baseline
    from tokenmix_core.training.baselines import corpus as corpus
    from tokenmix_core.training.baselines import language_model as language_model
    from tokenmix_core.training.baselines import model_fields as model_fields
    from tokenmix_core.training.baselines import recall as recall
    from tokenmix_core.training.baselines import tiny as tiny
    from tokenmix_core.training.baselines import tiny_setting as tiny_setting
    from tokenmix_core.training.callbacks import AdaptHeadWeights as AdaptHeadWeights
    from tokenmix_core.training.callbacks import read_metrics as read_metrics
    from tokenmix_core.training.data import RowInputs as RowInputs
    from tokenmix_core.training.finetuning import finetune_recipe as finetune_recipe
    from tokenmix_core.training.finetuning import train_only as train_only
    from tokenmix_core.training.overrides import overridden as overridden
    from tokenmix_core.training.recipe import DataRecipe as DataRecipe
    from tokenmix_core.training.recipe import OptimizerRecipe as OptimizerRecipe
    from tokenmix_core.training.recipe import Recipe as Recipe
    from tokenmix_core.training.recipe import RunRecipe as RunRecipe
    from tokenmix_core.training.recipe import Tokens as Tokens
    from tokenmix_core.training.sharding import float32_apart as float32_apart
    from tokenmix_core.training.weight_decay import parameter_groups as parameter_groups

__getattr__ = lazily(__name__)
