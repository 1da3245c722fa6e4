"""Data: sources of text, token files made from them, the byte tokenizer, the built-in corpus, and synthetic tasks."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.data.synthetic import NIAH_TASKS as NIAH_TASKS
    from tokenmix_core.data.synthetic import NiahExample as NiahExample
    from tokenmix_core.data.synthetic import mqar as mqar
    from tokenmix_core.data.token_file import META as META

__getattr__ = lazily(__name__)
