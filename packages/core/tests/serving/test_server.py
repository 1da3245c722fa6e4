"""Test a server process with the `openai` client: answers, streams, refusals, disconnects, and its end."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tokenmix_core.cli import main
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.modeling.cache_name import CACHE

httpx, openai = (pytest.importorskip(name) for name in ("httpx", "openai"))
pytest.importorskip("fastapi", reason="fastapi is not installed: uv sync --extra serve")
pytestmark = pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        mixers=["gated_delta_net", "attention"],
        mixer_options={"gated_delta_net": {"num_heads": 2, "head_dim": 8}, "attention": {"num_heads": 2}},
        initializer_range=0.5,
        max_position_embeddings=400,
    )
    return HybridForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """Return the URL of a running server; its process ends in order after the tests."""
    options = ["--port", "0", "--prefix-cache", "1000000", "--max-waiting", "20"]
    command = [sys.executable, "-m", "tokenmix_core.cli", "serve", str(folder), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as run:
        said = run.stdout.readline()
        assert "only this machine" in said, said
        url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        _wait_until(lambda: _get(f"{url}/health") == 200)
        yield url
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def _get(url):
    try:
        return httpx.get(url).status_code
    except httpx.TransportError:
        return None


def _wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metrics(server):
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    return {name: float(value) for name, value in (x.split() for x in lines if not x.startswith("#"))}


def greedy(model, prompt, tokens):
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True)


def test_concurrent_greedy_answers_are_those_of_generate(model, client):
    prompts = [f"def f{i}({'x' * i}):" for i in range(12)]

    def ask(prompt):
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [greedy(model, prompt, 20) for prompt in prompts]
    # several prompts in one request, as text and as tokens
    both = client.completions.create(model="tiny", prompt=prompts[:2], max_tokens=20, temperature=0)
    assert [x.text for x in both.choices] == answers[:2]
    ids = byte_tokenizer()(prompts[3])["input_ids"]
    assert (
        client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0).choices[0].text == answers[3]
    )


def test_streams_seeds_usage_and_several_answers(client):
    options = {"model": "tiny", "prompt": "import ", "max_tokens": 30, "seed": 7, "n": 2}
    whole = client.completions.create(**options)
    texts = [x.text for x in whole.choices]
    assert texts[0] != texts[1]
    assert whole.usage.completion_tokens <= 60
    parts, usage = ["", ""], None
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            parts[choice.index] += choice.text
        usage = event.usage or usage
    assert parts == texts
    assert usage == whole.usage
    other = client.completions.create(**options | {"seed": 8})
    assert [x.text for x in other.choices] != texts


def test_stop_strings_end_the_text_before_them(model, client):
    text = greedy(model, "class A", 40)
    stop = text[7:10]
    for stream in (False, True):
        made = client.completions.create(
            model="tiny", prompt="class A", max_tokens=40, temperature=0, stop=[stop, "never"], stream=stream
        )
        chosen = [x.choices[0] for x in made] if stream else made.choices
        assert "".join(x.text for x in chosen) == text[: text.index(stop)]
        assert chosen[-1].finish_reason == "stop"


def test_logprobs_are_those_of_the_model(model, client):
    made = client.completions.create(model="tiny", prompt="x = ", max_tokens=5, temperature=0, logprobs=2)
    logs = made.choices[0].logprobs
    ids = byte_tokenizer()("x = ")["input_ids"]
    out = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    exact = model(out, use_cache=False).logits[0].log_softmax(-1)
    wanted = exact[len(ids) - 1 : -1].gather(1, out[0, len(ids) :, None])[:, 0]
    assert logs.token_logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
    assert all(len(x) <= 2 for x in logs.top_logprobs)


def test_chat_uses_the_template(model, client):
    messages = [{"role": "user", "content": "hello"}]
    wanted = greedy(model, "user: hello\nassistant:", 16)
    options = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0}
    made = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    assert made.choices[0].message.content == wanted
    assert made.choices[0].finish_reason == "length"
    assert len(made.choices[0].logprobs.content) == 16
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(x.choices[0].delta.content or "" for x in stream) == wanted
    assert client.models.list().data[0].id == client.models.retrieve("tiny").id == "tiny"


def test_prompts_that_share_their_first_tokens_share_their_states(model, server, client):
    shared = "x = 1\n" * 50
    before = metrics(server)["tokenmix_prefix_hits_total"]
    saved = []
    for end in ("a", "b"):
        options = {"model": "tiny", "prompt": shared + end, "max_tokens": 9, "temperature": 0}
        made = client.completions.create(**options)
        assert made.choices[0].text == greedy(model, shared + end, 9)
        saved.append(made.usage.prompt_tokens_details.cached_tokens)
    assert saved == [0, 256]
    seen = metrics(server)
    assert seen["tokenmix_prefix_hits_total"] == before + 1
    assert seen["tokenmix_prefix_bytes"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", {"model": "other", "prompt": "a"}, 404, "'tiny' is"),
        ("completions", {"prompt": "a" * 500}, 400, "exceed the 400 tokens"),
        ("completions", {"prompt": [5, 9999]}, 400, "token ids"),
        ("completions", {"prompt": ""}, 400, "at least one token"),
        ("completions", {"prompt": []}, 400, "at least one"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ["a"] * 7, "n": 3}, 400, "asks for 21 answers, at most 20 may wait or run"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "a", "logit_bias": {"3": 5}}, 400, "logit_bias is not available"),
        ("completions", {"prompt": "a", "generation_mode": "linear"}, 400, "unknown option generation_mode"),
        ("completions", {"prompt": "a", "mode": "linear"}, 400, "the model takes no mode"),
        ("completions", {"prompt": "a", "mode": 3}, 400, "mode"),
        ("completions", {"prompt": "a", "model": "tiny:linear"}, 404, "'tiny' is"),
        ("completions", {"prompt": "\ud800"}, 400, "surrogates"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"content": 3}], "n": "x"}, 400, "n"),
        ("completions", "{not json", 400, "JSON"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_wrong_requests_get_one_sentence(server, path, body, status, said):
    content = body if isinstance(body, str) else json.dumps(body)
    made = httpx.post(f"{server}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert made.status_code == status
    error = made.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_more_answers_than_may_wait_are_refused(server, client):
    held = client.completions.create(model="tiny", prompt=["a"] * 11, max_tokens=390, temperature=0, stream=True)
    next(iter(held))
    made = httpx.post(f"{server}/v1/completions", json={"prompt": ["a"] * 10})
    assert made.status_code == 429
    assert made.json()["error"]["message"] == "11 answers wait or run, at most 20 may: try again later"
    assert client.completions.create(model="tiny", prompt=["a"] * 9, max_tokens=1).choices[8].finish_reason
    held.response.close()
    _wait_until(lambda: metrics(server)["tokenmix_requests_active"] == 0)


@pytest.mark.parametrize("option", [{"temperature": 1e-45}, {"top_p": 1e-300}, {"top_k": 1 << 63}])
def test_extreme_options_of_sampling_do_not_stop_the_engine(server, option):
    options = {"prompt": "ab", "max_tokens": 4, "seed": 0}
    made = httpx.post(f"{server}/v1/completions", json=options | option)
    plain = httpx.post(f"{server}/v1/completions", json=options | ({} if "top_k" in option else {"temperature": 0}))
    assert made.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


def test_large_and_endless_bodies_are_refused_before_they_are_read(server):
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    made = httpx.post(f"{server}/v1/completions", content=(b"x" for _ in range(3)))
    assert made.status_code == 411


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server, client, stream):
    before = metrics(server)["tokenmix_cancelled_total"]
    options = {"model": "tiny", "prompt": "a", "max_tokens": 390, "temperature": 0, "stream": stream}
    if stream:
        events = client.completions.create(**options)
        next(iter(events))
        events.response.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**options, timeout=0.1)
    _wait_until(lambda: metrics(server)["tokenmix_cancelled_total"] > before)
    assert metrics(server)["tokenmix_requests_active"] == 0


def test_the_server_still_answers_and_holds_nothing(server, client):
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices[0].finish_reason
    seen = metrics(server)
    assert seen["tokenmix_requests_active"] == seen["tokenmix_failed_total"] == 0


def test_a_busy_port_and_wrong_options_are_told(folder, server, capsys):
    port = server.rpartition(":")[2]
    for options, said in (
        (["--port", port], "in use"),
        (["--max-model-len", "0"], "at least 1"),
        (["--max-waiting", "0"], "at least 1"),
        (["--prefix-cache", "-1"], "at least 0 bytes"),
    ):
        assert main(["serve", str(folder), *options]) == 2
        assert said in capsys.readouterr().err
