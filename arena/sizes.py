"""How large a comparison is: the models' shape, the tokens of a run, the rates and seeds that everybody gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

# below these no result says anything about a mixer, and nothing is claimed from one
LEAST_RATES, LEAST_SEEDS = 3, 3


@dataclass(frozen=True)
class Size:
    """One comparison.

    Attributes:
        name: what it is called on the command line; results lie in a folder of this name.
        width, layers: of every model; layers are a multiple of four.
        head: channels K of a head of the recurrences, a divisor of `width`.
        attention_head: channels of a head of attention and of Mamba-2, a divisor of `width`.
        slots, near: memory slots, and the window beside them, of NHA.
        mlp_step: inner widths of MLPs are multiples of it.
        seq_len: T, tokens of a training row of the tasks but needles.
        needle_len: tokens of a training row with a needle; the shortest prompt takes about 600 bytes.
        words: vocabulary of associative recall.
        deviation: standard deviation of initial weights.
        steps: optimizer steps of a run.
        ramp: the share of them over which examples of recall and copying grow from two pairs or tokens,
            and rows with needles from one fact.
        readers: processes that make the rows of a run beside it; 0 where as many runs as cores go side by side.
        batch_tokens: tokens of a step, a multiple of both row lengths.
        rates: the grid of learning rates, the same for all.
        tuning_seed: the seed at which a rate is chosen, which no result counts.
        seeds: the seeds of the results.
        examples: sequences of an evaluation.
        reach: text is read to this many times the training length.
        cost_lengths: contexts at which speed and memory are measured.
        contestants, divisions, tasks: what belongs to a comparison of this size, by name; none named: everybody
            who is not `extra`, both divisions, and all tasks.
    """

    name: str
    width: int
    layers: int
    head: int
    attention_head: int
    slots: int
    near: int
    mlp_step: int
    seq_len: int
    needle_len: int
    words: int
    deviation: float
    steps: int
    ramp: float
    readers: int
    batch_tokens: int
    rates: tuple[float, ...]
    tuning_seed: int
    seeds: tuple[int, ...]
    examples: int
    reach: int
    cost_lengths: tuple[int, ...]
    contestants: tuple[str, ...] = ()
    divisions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    @property
    def says_something(self) -> bool:
        """Tell whether rates are chosen and intervals known, so that words may be made of the results."""
        return len(self.rates) >= LEAST_RATES and len(self.seeds) >= LEAST_SEEDS


# 85M parameters beside the embedding: those that LTE's and NAtS-L's papers compare, on what models of this size
# learn in some million tokens. Steps count for more than tokens in learning recall, so batches are small; rates
# and initial weights are smaller than those of narrow models (docs/log/training.md, "Recall at 340M")
MEDIUM = Size(
    name="medium",
    width=768,
    layers=12,
    head=128,
    attention_head=64,
    slots=64,
    near=32,
    mlp_step=8,
    seq_len=1024,
    needle_len=1024,
    words=1024,
    deviation=0.005,
    steps=1500,
    ramp=0.7,
    readers=0,
    batch_tokens=2**12,
    rates=(2.5e-4, 5e-4, 1e-3),
    tuning_seed=0,
    seeds=(1, 2, 3),
    examples=128,
    reach=16,
    cost_lengths=(1024, 4096, 16384, 65536),
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
SIZES = {
    size.name: size
    for size in (
        Size(
            name="smoke",
            width=64,
            layers=4,
            head=64,
            attention_head=32,
            slots=16,
            near=16,
            mlp_step=2,
            seq_len=128,
            needle_len=640,
            words=128,
            deviation=0.02,
            steps=3,
            ramp=0.7,
            readers=0,
            batch_tokens=1280,
            rates=(3e-3,),
            tuning_seed=0,
            seeds=(1,),
            examples=2,
            reach=4,
            cost_lengths=(64, 256),
        ),
        # 0.85M parameters beside the embedding: the least that says something, made for many runs beside each other on
        # a GPU or two, so that rows are made in the run's own process. 128 pairs are twice the keys that a head's state
        # can tell apart. Attention had not learnt two pairs after 400 steps, hence the slow ramp. Costs end at 16,384
        # tokens, where attention keeps some hundred times the bytes of Gated DeltaNet: of models as narrow as these,
        # longer contexts show no more
        Size(
            name="compact",
            width=128,
            layers=4,
            head=64,
            attention_head=64,
            slots=32,
            near=32,
            mlp_step=4,
            seq_len=512,
            needle_len=1024,
            words=512,
            deviation=0.02,
            steps=1500,
            ramp=0.9,
            readers=0,
            batch_tokens=2**13,
            rates=(1e-3, 2e-3, 4e-3),
            tuning_seed=0,
            seeds=(1, 2, 3),
            examples=128,
            reach=16,
            cost_lengths=(1024, 4096, 16384),
        ),
        # 3M parameters beside the embedding, a minute or two a run
        Size(
            name="small",
            width=256,
            layers=4,
            head=64,
            attention_head=64,
            slots=32,
            near=32,
            mlp_step=8,
            seq_len=1024,
            needle_len=1024,
            words=1024,
            deviation=0.02,
            steps=2000,
            ramp=0.7,
            readers=2,
            batch_tokens=2**14,
            rates=(5e-4, 1e-3, 2e-3, 4e-3),
            tuning_seed=0,
            seeds=(1, 2, 3),
            examples=128,
            reach=16,
            cost_lengths=(1024, 4096, 16384, 65536),
        ),
        MEDIUM,
        # needles, which none of these models had learnt after 1,500 steps at the rates that were chosen: twice as many
        # steps, for those whom NAtS-L's paper compares
        replace(
            MEDIUM,
            name="needles",
            steps=3000,
            contestants=("attention", "gdn", "gdn-h", "nats-l", "nats-l-h"),
            tasks=("niah",),
        ),
    )
}
