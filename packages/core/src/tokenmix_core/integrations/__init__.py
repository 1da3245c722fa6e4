"""Interfaces to other libraries: their call signatures and checkpoint layouts, transformers' models on our kernels."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.integrations.checkpoints import Fields as Fields
    from tokenmix_core.integrations.checkpoints import Layout as Layout
    from tokenmix_core.integrations.checkpoints import Names as Names
    from tokenmix_core.integrations.checkpoints import check_dtype as check_dtype
    from tokenmix_core.integrations.checkpoints import convert_folder as convert_folder
    from tokenmix_core.integrations.checkpoints import layout_of as layout_of
    from tokenmix_core.integrations.checkpoints import load_third_party as load_third_party
    from tokenmix_core.integrations.checkpoints import read_fields as read_fields
    from tokenmix_core.integrations.fla import Result as Result
    from tokenmix_core.integrations.fla import as_float32 as as_float32
    from tokenmix_core.integrations.fla import as_values as as_values
    from tokenmix_core.integrations.fla import refuse_unknown as refuse_unknown
    from tokenmix_core.integrations.fla import reversed_tokens as reversed_tokens
    from tokenmix_core.integrations.fla import state_layout as state_layout
    from tokenmix_core.integrations.fla import tokens_first as tokens_first
    from tokenmix_core.integrations.layouts import LAYOUTS as LAYOUTS
    from tokenmix_core.integrations.layouts import delta_names as delta_names
    from tokenmix_core.integrations.layouts import fla_config as fla_config
    from tokenmix_core.integrations.layouts import fla_names as fla_names
    from tokenmix_core.integrations.layouts import hybrid_mixers as hybrid_mixers
    from tokenmix_core.integrations.trl import count_auxiliary_losses as count_auxiliary_losses

__getattr__ = lazily(__name__)
