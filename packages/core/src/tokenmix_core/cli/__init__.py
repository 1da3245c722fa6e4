"""The command line of core and of the papers' packages."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.cli.app import AddCommand as AddCommand
    from tokenmix_core.cli.app import add_device as add_device
    from tokenmix_core.cli.app import add_eval_options as add_eval_options
    from tokenmix_core.cli.app import layer_indices as layer_indices
    from tokenmix_core.cli.app import main as main
    from tokenmix_core.cli.app import positive_integers as positive_integers
    from tokenmix_core.cli.commands import DTYPES as DTYPES
    from tokenmix_core.cli.commands import config_of as config_of
    from tokenmix_core.cli.commands import device_and_dtype as device_and_dtype
    from tokenmix_core.cli.commands import is_checkpoint as is_checkpoint
    from tokenmix_core.cli.commands import load_model as load_model
    from tokenmix_core.cli.commands import load_tokenizer as load_tokenizer
    from tokenmix_core.cli.finetune import add_finetune as add_finetune
    from tokenmix_core.cli.finetune import run_finetune as run_finetune

__getattr__ = lazily(__name__)
