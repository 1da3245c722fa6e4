"""The tasks of Tables 3, 4 and 9 with lm-eval's names and metrics, on local data of the same form."""

from functools import partial

import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_nha import pretrained
from tokenmix_nha.evals import SUITES
from tokenmix_nha.model import NhaConfig, NhaForCausalLM
from tokenmix_nha.windows import nha_layers

lm_eval = pytest.importorskip("lm_eval")

LOCAL = """
import datasets

def rows(count, gold):
    made = [{"text": f"question {i}", "choices": ["a", "a longer answer"], "gold": gold} for i in range(count)]
    return {"test": datasets.Dataset.from_list(made), "dev": datasets.Dataset.from_list(made[:1] * 8)}

def short(**_):
    return rows(8, 0)

def long(**_):
    return rows(2, 1)

def prompts(**_):
    return {"test": datasets.Dataset.from_list([{"text": f"write {i}"} for i in range(3)])}

def instructions(doc, results):
    obeyed = [True, doc["text"] != "write 0"]
    return {"prompt_level_strict_acc": all(obeyed), "inst_level_strict_acc": obeyed}

def mean_of_lists(items):
    return sum(sum(i) for i in items) / sum(len(i) for i in items)

def pass_at_k(references, predictions, k=None):
    return {"pass@1": float(predictions[0][0].startswith("write 1"))}

def programs(resps, docs):
    return [[doc["text"] + r for r in resp] for resp, doc in zip(resps, docs)]
"""
CHOICES = """
task: NAME
custom_dataset: !function local.ROWS
output_type: multiple_choice
test_split: test
fewshot_split: dev
fewshot_config: {sampler: first_n}
doc_to_text: "{{text}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
IFEVAL = """
task: ifeval
custom_dataset: !function local.prompts
output_type: generate_until
test_split: test
doc_to_text: text
doc_to_target: 0
generation_kwargs: {until: [], do_sample: false, max_gen_toks: 4}
process_results: !function local.instructions
metric_list:
  - {metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}
  - {metric: inst_level_strict_acc, aggregation: !function local.mean_of_lists, higher_is_better: true}
"""
HUMANEVAL = """
task: humaneval
custom_dataset: !function local.prompts
unsafe_code: true
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["QQ"], do_sample: false, max_gen_toks: 4}
metric_list:
  - {metric: !function local.pass_at_k, aggregation: mean, higher_is_better: true, k: [1]}
filter_list:
  - name: create_test
    filter:
      - {function: custom, filter_fn: !function local.programs}
"""
SUBJECTS = ("mmlu_anatomy", "mmlu_virology")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a suite on local tasks: `acc` 1, `acc_norm` 0; the reverse for a subject of MMLU."""
    torch.manual_seed(0)
    fields = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    model = NhaForCausalLM(NhaConfig(**fields, **nha_layers(8, num_heads=2, slots=4))).eval()
    (tmp_path / "local.py").write_text(LOCAL)
    for name in (*pretrained.UNDERSTANDING, "gpqa_main_zeroshot", "mathqa", *SUBJECTS):
        rows = "long" if name == "mmlu_virology" else "short"
        (tmp_path / f"{name}.yaml").write_text(CHOICES.replace("NAME", name).replace("ROWS", rows))
    (tmp_path / "ifeval.yaml").write_text(IFEVAL)
    (tmp_path / "humaneval.yaml").write_text(HUMANEVAL)
    monkeypatch.setattr(pretrained, "MMLU", SUBJECTS)
    monkeypatch.setattr(pretrained, "run_tasks", partial(pretrained.run_tasks, include=[tmp_path], builtin=False))
    return lambda suite, **options: SUITES[suite].run(
        model, byte_tokenizer(), EvalOptions(progress=False, max_length=512, **options)
    )


def values(result):
    return {(row["task"], row["metric"]): row["value"] for row in result["rows"]}


def test_understanding_has_the_averages_of_tables_3_and_9(run):
    result = run("understanding")
    found = values(result)
    # the mean over questions, not over subjects
    assert found["mmlu", "acc"] == 8 / 10
    assert not {row["task"] for row in result["rows"]} & set(SUBJECTS)
    assert next(row for row in result["rows"] if row["task"] == "mmlu")["examples"] == 10
    ones = {("arc_easy", "acc"), ("lambada_openai", "acc"), ("piqa", "acc"), ("winogrande", "acc")}
    assert {found[key] for key in ones} == {1.0}
    assert found["arc_challenge", "acc_norm"] == found["hellaswag", "acc_norm"] == 0
    assert found["average", "7 tasks of Table 3"] == pytest.approx((4 + 0.8) / 7)
    assert found["average", "6 tasks of Table 9"] == pytest.approx((3 + 0.8) / 6)
    assert result["settings"]["MMLU's examples before a question"] == 5


def test_mmlu_has_five_shots_and_other_tasks_none(run, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    asked = {}
    score = HFLM.loglikelihood

    def watch(self, requests, **kwargs):
        for request in requests:
            asked.setdefault(request.task_name, request.args[0])
        return score(self, requests, **kwargs)

    monkeypatch.setattr(HFLM, "loglikelihood", watch)
    run("understanding", tasks=("piqa", "mmlu"), limit=1)
    assert {name: text.count("Answer:") for name, text in asked.items()} == {"piqa": 1, **dict.fromkeys(SUBJECTS, 6)}


def test_knowledge_counts_single_instructions_and_programs_that_pass(run, monkeypatch):
    monkeypatch.setenv(pretrained.ALLOW_CODE, "1")
    found = values(run("knowledge"))
    assert found["ifeval", "inst_level_strict_acc"] == pytest.approx(5 / 6)
    assert found["ifeval", "prompt_level_strict_acc"] == pytest.approx(2 / 3)
    assert found["humaneval", "pass@1 (create_test)"] == pytest.approx(1 / 3)
    assert found["average", "5 tasks of Table 4"] == pytest.approx((1 + 5 / 6 + 1 / 3 + 1 + 0.8) / 5)


def test_programs_of_the_model_run_only_if_allowed(run, monkeypatch):
    monkeypatch.delenv(pretrained.ALLOW_CODE, raising=False)
    with pytest.raises(ValueError, match=r"set HF_ALLOW_CODE_EVAL=1 .* --tasks gpqa_main_zeroshot,ifeval,mathqa,mmlu"):
        run("knowledge")
    found = values(run("knowledge", tasks=("gpqa_main_zeroshot",)))
    assert found == {("gpqa_main_zeroshot", "acc"): 1.0, ("gpqa_main_zeroshot", "acc_norm"): 0.0}


def test_lm_eval_has_every_task_and_metric():
    from pathlib import Path

    import lm_eval.tasks
    import yaml

    folder = Path(lm_eval.tasks.__file__).parent
    names = {path.stem for path in (folder / "mmlu" / "default").glob("mmlu_*.yaml")}
    assert names == set(pretrained.MMLU)
    assert len(names) == 57
    known = lm_eval.tasks.TaskManager().all_tasks
    assert {*pretrained.UNDERSTANDING, *pretrained.KNOWLEDGE, *pretrained.MMLU} <= set(known)

    class Loader(yaml.SafeLoader):
        """Read the tag `!function` as the text after it."""

    Loader.add_constructor("!function", lambda loader, node: node.value)
    for path, metric in (
        ("ifeval/ifeval.yaml", "inst_level_strict_acc"),
        ("mathqa/mathqa.yaml", "acc"),
        ("gpqa/zeroshot/_gpqa_zeroshot_yaml", "acc"),
        ("humaneval/humaneval.yaml", "utils.pass_at_k"),
    ):
        config = yaml.load((folder / path).read_text(), Loader)
        assert metric in [entry["metric"] for entry in config["metric_list"]]
    assert [part["name"] for part in config["filter_list"]] == ["create_test"]
