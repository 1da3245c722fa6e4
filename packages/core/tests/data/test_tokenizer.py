import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tokenmix_core.data.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_fingerprint

TOKENIZER = byte_tokenizer()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_is_its_bytes_and_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


def test_all_bytes_and_line_ends_come_back():
    text = "".join(map(chr, range(0x800))) + "\r\n \n\n  漢字 😀 \u200d end "
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_text_that_names_a_special_token_is_bytes(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for tokenizer in (TOKENIZER, AutoTokenizer.from_pretrained(tmp_path)):
        assert bytes(tokenizer("a<|end|>b")["input_ids"]) == b"a<|end|>b"


def test_special_tokens_follow_the_bytes():
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (256, 257, 258)
    assert len(TOKENIZER) == 259
    assert TOKENIZER.decode([104, 105, 258], skip_special_tokens=True) == "hi"


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(TOKENIZER)
        assert loaded("a\n b")["input_ids"] == TOKENIZER("a\n b")["input_ids"]


def test_the_fingerprint_tells_tokenizers_apart():
    other = byte_tokenizer()
    other.add_tokens(["<extra>"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(TOKENIZER)


def test_an_unknown_tokenizer_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"tokenizer .*nothing.* could not be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))
