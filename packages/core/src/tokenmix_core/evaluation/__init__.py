"""Evaluation of any causal language model: suites by name, offline or through lm-eval, and reports."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.evaluation.efficiency import curve as curve
    from tokenmix_core.evaluation.efficiency import settings_of as settings_of
    from tokenmix_core.evaluation.harness import run_tasks as run_tasks
    from tokenmix_core.evaluation.options import EvalOptions as EvalOptions
    from tokenmix_core.evaluation.options import Plot as Plot
    from tokenmix_core.evaluation.options import Series as Series
    from tokenmix_core.evaluation.options import Suite as Suite
    from tokenmix_core.evaluation.options import SuiteResult as SuiteResult
    from tokenmix_core.evaluation.options import layer_heatmap as layer_heatmap
    from tokenmix_core.evaluation.options import one_sequence as one_sequence
    from tokenmix_core.evaluation.origin import provenance as provenance
    from tokenmix_core.evaluation.parts import Parts as Parts
    from tokenmix_core.evaluation.perplexity import cut_sequences as cut_sequences
    from tokenmix_core.evaluation.perplexity import perplexity_suite as perplexity_suite
    from tokenmix_core.evaluation.perplexity import smooth as smooth
    from tokenmix_core.evaluation.perplexity import token_losses as token_losses
    from tokenmix_core.evaluation.recall import MQAR_HELD_OUT as MQAR_HELD_OUT
    from tokenmix_core.evaluation.recall import MQAR_LENGTHS as MQAR_LENGTHS
    from tokenmix_core.evaluation.recall import NIAH_LENGTHS as NIAH_LENGTHS
    from tokenmix_core.evaluation.recall import answer_loss as answer_loss
    from tokenmix_core.evaluation.recall import generate_text as generate_text
    from tokenmix_core.evaluation.recall import mqar_cases as mqar_cases
    from tokenmix_core.evaluation.recall import mqar_suite as mqar_suite
    from tokenmix_core.evaluation.recall import niah_examples as niah_examples
    from tokenmix_core.evaluation.recall import niah_haystack as niah_haystack
    from tokenmix_core.evaluation.recall import niah_suite as niah_suite
    from tokenmix_core.evaluation.report import format_rows as format_rows
    from tokenmix_core.evaluation.report import write_result as write_result
    from tokenmix_core.evaluation.suites import COMMONSENSE as COMMONSENSE
    from tokenmix_core.evaluation.suites import LM_EVAL_READS as LM_EVAL_READS
    from tokenmix_core.evaluation.suites import LONGBENCH as LONGBENCH
    from tokenmix_core.evaluation.suites import RECALL as RECALL
    from tokenmix_core.evaluation.suites import RULER as RULER
    from tokenmix_core.evaluation.suites import check_suites as check_suites
    from tokenmix_core.evaluation.suites import commonsense_suite as commonsense_suite
    from tokenmix_core.evaluation.suites import recall_suite as recall_suite
    from tokenmix_core.evaluation.text import BUILT_IN_TEXT as BUILT_IN_TEXT
    from tokenmix_core.evaluation.text import text_tokens as text_tokens
    from tokenmix_core.evaluation.text import text_vocab_size as text_vocab_size

__getattr__ = lazily(__name__)
