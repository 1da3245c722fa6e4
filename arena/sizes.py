"""Sizes of comparisons: dimensions of models, lengths of runs, learning rates and seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

# minimum numbers of learning rates and of seeds with which a size supports claims
MIN_RATES, MIN_SEEDS = 3, 3


@dataclass(frozen=True)
class Size:
    """The settings of one comparison, which are equal for all contestants.

    Attributes:
        name: name on the command line and of the folder of results.
        width: hidden size of the models.
        layers: number of layers, a multiple of four.
        head_dim: key channels K per head of the recurrences, a divisor of `width`.
        attention_head_dim: channels per head of attention and of Mamba-2, a divisor of `width`.
        nha_slots: number of memory slots in NHA.
        nha_window: attention window of NHA, in tokens.
        mlp_multiple: inner widths of MLPs are multiples of this.
        seq_len: number of tokens T in a training row, in all tasks except needles.
        needle_len: number of tokens in a training row of the task needles, whose shortest prompt takes about 600 bytes.
        recall_vocab_size: size of the vocabulary in associative recall.
        initializer_range: standard deviation of the initial weights.
        steps: number of optimizer steps of a run.
        ramp: fraction of the steps over which examples grow: in recall from two pairs, in copying from two tokens, in
            needles from one fact.
        dataloader_workers: number of processes per run that prepare rows; use 0 if there are as many concurrent runs as
            CPU cores.
        batch_tokens: number of tokens per step, a multiple of both row lengths.
        rates: the grid of learning rates.
        tuning_seed: seed of the runs that select the learning rate; no reported run has it.
        seeds: seeds of the reported runs. If the size supports claims, both kinds of runs have the seeds of `rules.py`
            instead.
        examples: number of sequences in an evaluation.
        eval_length_factor: length of the longest text in evaluations, in multiples of `seq_len`.
        cost_lengths: context lengths at which speed and memory are measured.
        sparsity: divisor of the windows and of the limits on retained keys (LTE's cap, the budget of eviction) of
            mixers that attend to a part of the text, so that some keys are out of their reach.
        corpus: whether the task `text` trains on the corpus of `corpus.py`, which adds zero-shot retrieval, instead of
            on the built-in corpus.
        retrieval_lengths: context lengths of zero-shot retrieval.
        speed: expected training speed in tokens/s on an H100, for plans before any run is measured.
        contestants: names of the contestants in the order of the runs; if empty, `DEFAULT_CONTESTANTS`.
        divisions: names in `contestants.DIVISIONS`; if empty, both.
        tasks: names of the tasks; if empty, all tasks.
    """

    name: str
    width: int
    layers: int
    head_dim: int
    attention_head_dim: int
    nha_slots: int
    nha_window: int
    mlp_multiple: int
    seq_len: int
    needle_len: int
    recall_vocab_size: int
    initializer_range: float
    steps: int
    ramp: float
    dataloader_workers: int
    batch_tokens: int
    rates: tuple[float, ...]
    tuning_seed: int
    seeds: tuple[int, ...]
    examples: int
    eval_length_factor: int
    cost_lengths: tuple[int, ...]
    sparsity: int = 1
    corpus: bool = False
    retrieval_lengths: tuple[int, ...] = ()
    speed: float = 2e5
    contestants: tuple[str, ...] = ()
    divisions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    @property
    def supports_claims(self) -> bool:
        """True if there are enough learning rates to choose the best, and enough seeds for a confidence interval."""
        return len(self.rates) >= MIN_RATES and len(self.seeds) >= MIN_SEEDS


# the smallest size: it only shows that everything runs
SMOKE = Size(
    name="smoke",
    width=64,
    layers=4,
    head_dim=64,
    attention_head_dim=32,
    nha_slots=16,
    nha_window=16,
    mlp_multiple=2,
    seq_len=128,
    needle_len=640,
    recall_vocab_size=128,
    initializer_range=0.02,
    steps=3,
    ramp=0.7,
    dataloader_workers=0,
    batch_tokens=1280,
    rates=(3e-3,),
    tuning_seed=0,
    seeds=(1,),
    examples=2,
    eval_length_factor=4,
    cost_lengths=(64, 256),
)
# 0.85M parameters without the embedding: the smallest size that supports claims. Many runs share one or two GPUs, so
# each run prepares rows in its own process. 128 pairs are twice as many keys as the state of a head can distinguish.
# The ramp is slow, because attention had not learnt two pairs after 400 steps. Costs are measured up to 16,384 tokens,
# at which attention keeps some hundred times the bytes of Gated DeltaNet; longer contexts show nothing further for
# models so small
COMPACT = replace(
    SMOKE,
    name="compact",
    width=128,
    attention_head_dim=64,
    nha_slots=32,
    nha_window=32,
    mlp_multiple=4,
    seq_len=512,
    needle_len=1024,
    recall_vocab_size=512,
    steps=1500,
    ramp=0.9,
    batch_tokens=2**13,
    rates=(1e-3, 2e-3, 4e-3),
    seeds=(1, 2, 3),
    examples=128,
    eval_length_factor=16,
    cost_lengths=(1024, 4096, 16384),
)
# 3M parameters without the embedding; a run takes one to two minutes
SMALL = replace(
    COMPACT,
    name="small",
    width=256,
    mlp_multiple=8,
    seq_len=1024,
    recall_vocab_size=1024,
    steps=2000,
    ramp=0.7,
    dataloader_workers=2,
    batch_tokens=2**14,
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
    cost_lengths=(1024, 4096, 16384, 65536),
)
# 85M parameters without the embedding: the contestants in the papers on LTE and NAtS-L, on tasks that models of this
# size learn within some million tokens. Recall depends more on the number of steps than on tokens, so batches are
# small. Rates and initial weights are smaller than for smaller models (docs/log/training.md, "Recall at 340M")
MEDIUM = replace(
    SMALL,
    name="medium",
    width=768,
    layers=12,
    head_dim=128,
    nha_slots=64,
    initializer_range=0.005,
    steps=1500,
    dataloader_workers=0,
    batch_tokens=2**12,
    rates=(2.5e-4, 5e-4, 1e-3),
    contestants=(
        "attention",
        "gdn",
        "gdn-h",
        "nats-l",
        "nats-l-h",
        "nats-l-h-softmax-own-chunk",
        "nats-l-h-linear-own-chunk",
        "nats-l-h-no-decay",
        "nats-l-h-norm-of-sum",
        "nats-l-h-no-weights",
        "nats-l-h-weights-from-inputs",
        "gdn-attention",
        "gdn-swa",
        "lalte",
        "lalte-mlp",
        "lansa",
    ),
    divisions=("parameters",),
    tasks=("mqar", "text"),
)
# twice as many steps as in the size medium, of which no model had learnt needles after 1,500 steps
NEEDLES = replace(
    MEDIUM,
    name="needles",
    steps=3000,
    contestants=("attention", "gdn", "gdn-h", "nats-l", "nats-l-h"),
    tasks=("niah",),
)
_RECALL = (
    *("attention", "gdn", "gdn-h", "nha-h", "lalte", "gdn-swa", "nats-l", "nats-l-h", "mamba2", "nha", "gsa", "gsa-h"),
    *("oryx-tm", "oryx-tg", "lansa", "nsa", "window", "gdn-attention", "lalte-mlp"),
)
# recall in which neither a window nor LTE's retained keys can hold a quarter of the largest example's pairs; twice the
# steps of COMPACT
RECALL_1M = replace(
    COMPACT,
    name="recall-1m",
    nha_window=16,
    steps=3000,
    seeds=(1, 2, 3, 4, 5),
    sparsity=4,
    contestants=_RECALL,
    tasks=("mqar", "copying"),
)
# the same for SMALL; the largest examples have 256 pairs in 1,024 tokens
RECALL_3M = replace(
    SMALL,
    name="recall-3m",
    nha_window=32,
    steps=4000,
    rates=(1e-3, 2e-3, 4e-3),
    seeds=(1, 2, 3, 4, 5),
    sparsity=4,
    contestants=_RECALL,
    dataloader_workers=0,
    tasks=("mqar", "copying"),
)
# 26M parameters without the embedding, 34M with it, on 301M tokens; contestants of the papers' main claims come first
TEXT_30M = replace(
    MEDIUM,
    name="text-30m",
    width=512,
    layers=8,
    mlp_multiple=16,
    seq_len=2048,
    needle_len=2048,
    initializer_range=0.02,
    steps=4600,
    ramp=0.0,
    dataloader_workers=2,
    batch_tokens=2**16,
    rates=(1e-3, 2e-3, 4e-3),
    examples=64,
    cost_lengths=(2048, 8192, 32768),
    corpus=True,
    retrieval_lengths=(1024, 2048, 4096, 8192),
    speed=3e5,
    contestants=(
        "gdn-h",
        "nha-h",
        "lalte",
        "nats-l-h",
        "attention",
        "gdn",
        "mamba2",
        "gdn-swa",
        "gsa-h",
        "oryx-tm",
        "oryx-tg",
        "gdn-h-nope",
        "nats-l-h-rope",
        "lalte-mlp",
        "nha-h-fixed-sum",
        "nats-l-h-softmax-own-chunk",
        "nats-l-h-linear-own-chunk",
        "oryx-tm-sequence",
        "gdn-attention",
        "lansa",
        "nsa",
        "nats-l",
        "nha",
        "gsa",
        "nats-l-h-share-10",
        "nats-l-h-share-50",
    ),
    tasks=("text",),
)
SIZES = {size.name: size for size in (SMOKE, COMPACT, SMALL, MEDIUM, NEEDLES, RECALL_1M, RECALL_3M, TEXT_30M)}
