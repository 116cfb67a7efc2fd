from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.data import tokens
from transformer.data.tokens import TOKENIZERS, Tokenizer, Vocabulary
from transformer.spec import SpecError, pick

NASTY = [
    "",
    " ",
    "<eos>",
    "<pad> a<bos>b <mask>",
    "a\r\nb\rc\n\n",
    "naïve — ½ ﬁ e\u0301",
    "\ufeffbom",
    "🏳️‍🌈 日本語 عربى",
    "\x00\x1c\x85\u2028",
    "  two  spaces\t\n tab",
]
TEXT = "To be, or not to be: that is the question. " * 50 + "".join(NASTY)


def train(text: str, training_text: str = TEXT) -> Tokenizer:
    entry: Any = pick(TOKENIZERS, text)
    return entry(lambda: iter([training_text[:100], training_text[100:]]))


ALL = {name: train(name) for name in ["bytes", "chars", "bpe(vocab_size=300)"]}


@pytest.fixture(params=ALL)
def tokenizer(request) -> Tokenizer:
    return ALL[request.param]


@pytest.mark.parametrize("text", NASTY)
def test_round_trip_is_exact_and_text_never_becomes_a_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert (ids >= 4).all() and (ids < tokenizer.size).all()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_and_bpe_cover_every_text(text):
    for name in ("bytes", "bpe(vocab_size=300)"):
        ids = ALL[name].encode(text)
        assert ALL[name].decode(ids) == text
        assert ALL[name].byte_lengths[ids].sum() == len(text.encode())


def test_ids_by_hand():
    assert train("bytes").encode("A€").tolist() == [4 + 65, 4 + 0xE2, 4 + 0x82, 4 + 0xAC]
    chars = train("chars", "hello")  # e h l o
    assert chars.size == 8
    assert chars.encode("hole").tolist() == [5, 7, 6, 4]
    assert chars.byte_lengths.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_bpe_learns_the_most_frequent_pair_first():
    # "ab" is the only pair that occurs; 4 specials and 256 bytes come before it.
    bpe = train("bpe", "ab ab ab x")
    assert bpe.pieces[260] == b"ab"
    assert bpe.encode("ab").tolist() == [260]


def test_bpe_is_the_same_every_time_and_small_when_the_text_is():
    assert train("bpe").to_json() == train("bpe").to_json()
    assert 260 < train("bpe").size < 8192
    assert train("bpe(vocab_size=270)").size == 270


def test_bpe_in_pieces_equals_bpe_at_once():
    text = "".join(f"word{i % 97}  x{i}\n" for i in range(20_000))
    assert len(text) > 3 * tokens._PIECE
    bpe = train("bpe(vocab_size=400)", text)
    assert isinstance(bpe, tokens.BpeTokenizer)
    whole = bpe._encoder.encode(text, add_special_tokens=False).ids
    assert bpe.encode(text).tolist() == whole


def test_specials_vanish_and_broken_utf8_is_replaced(tokenizer):
    a = tokenizer.encode("a").tolist()
    assert tokenizer.decode([1, *a, 3, *a, 2, 0]) == "aa"
    assert train("bytes").decode([4 + 0xE2, 4 + 65]) == "\ufffdA"


@pytest.mark.parametrize("ids", [[-1], [10**6]])
def test_an_id_outside_the_vocabulary_is_no_text(tokenizer, ids):
    with pytest.raises(ValueError, match="must lie in"):
        tokenizer.decode(ids)


def test_save_and_load(tokenizer, tmp_path):
    tokens.save(tokenizer, tmp_path / "tokenizer.json")
    again = tokens.load(tmp_path / "tokenizer.json")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("to be <eos>").tolist() == tokenizer.encode("to be <eos>").tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert len({t.fingerprint for t in ALL.values()}) == 3


def test_load_refuses_by_path(tmp_path):
    with pytest.raises(SpecError, match=f"no tokenizer at {tmp_path}/x"):
        tokens.load(tmp_path / "x")
    (tmp_path / "x").write_text('{"kind": "wordpiece"}')
    with pytest.raises(SpecError, match="is not a saved tokenizer"):
        tokens.load(tmp_path / "x")


def test_an_unknown_character_is_named():
    with pytest.raises(SpecError, match=r"does not know 'ß' \(U\+00DF\) at position 2, near 'heß'"):
        train("chars", "hello").encode("heß")
    with pytest.raises(SpecError, match=r"'😀' \(U\+1F600\)"):
        train("chars", "hello").encode("😀")


def test_half_a_surrogate_pair_is_refused():
    for name in ALL:
        with pytest.raises(SpecError, match="DC80"):
            ALL[name].encode("a\udc80")


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(SpecError, match="at least 260"):
        pick(TOKENIZERS, "bpe(vocab_size=100)")


def test_last_break_is_before_a_single_white_space():
    assert tokens.last_break("ab cd ef") == 5
    assert tokens.last_break("ab cd  ef") == 2
    assert tokens.last_break("abcdef") == 6
    assert tokens.last_break("a b" + "x" * 5000) == 5003


# -------------------------------------------------------------------------------------- vocabulary


def test_which_tokens_begin_and_end_inside_a_word():
    """Letters, digits and all beyond ASCII; of a token of several bytes, its first and its last."""
    begins, ends = train("bytes").inside_words
    inside = {*b"azAZ09", 0x80, 0xC3, 0xFF}
    outside = {*b" \n,._-'", 0x00, 0x7F}
    for side in (begins, ends):
        assert not side[:4].any(), "no special token"
        assert {b for b in inside | outside if side[4 + b]} == inside
    bpe = train("bpe", "the the the, a the")
    begins, ends = bpe.inside_words
    pieces = {piece: i for i, piece in enumerate(bpe.pieces)}
    assert (begins[pieces[b" the"]], ends[pieces[b" the"]]) == (False, True)
    assert (begins[pieces[b"he"]], ends[pieces[b"he"]]) == (True, True)


CHARS, OTHER = train("chars", "abc"), train("chars", "xyz")


@pytest.mark.parametrize(
    ("vocabulary", "files"),
    [
        (Vocabulary(CHARS), {"tokenizer.json"}),
        (Vocabulary(CHARS, OTHER), {"tokenizer.json", "source_tokenizer.json"}),
        (Vocabulary(CHARS, None, ("no", "ja, ß")), {"tokenizer.json", "labels.json"}),
    ],
)
def test_a_vocabulary_is_read_as_it_was_written(vocabulary, files, tmp_path):
    vocabulary.save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == files
    again = Vocabulary.load(tmp_path)
    assert again.fingerprint == vocabulary.fingerprint
    assert again.labels == vocabulary.labels
    assert again.tokenizer.encode("cab").tolist() == [6, 4, 5]
    assert again.of("source").encode(
        "cab" if again.source_tokenizer is None else "zxy"
    ).tolist() == [
        6,
        4,
        5,
    ]
    assert again.of("text").encode("cab").tolist() == [6, 4, 5]


def test_every_part_of_a_vocabulary_is_in_its_fingerprint():
    others = [
        Vocabulary(CHARS),
        Vocabulary(OTHER),
        Vocabulary(CHARS, OTHER),
        Vocabulary(CHARS, CHARS),
        Vocabulary(CHARS, None, ("a", "b")),
        Vocabulary(CHARS, None, ("b", "a")),
        Vocabulary(CHARS, None, ("a b",)),
    ]
    assert len({v.fingerprint for v in others}) == len(others)
    assert Vocabulary(train("chars", "abc")).fingerprint == others[0].fingerprint


@pytest.mark.parametrize("content", ["", "{}x", "7"])
def test_broken_labels_are_refused_by_path(content, tmp_path):
    Vocabulary(CHARS, None, ("a",)).save(tmp_path)
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(SpecError, match=f"{tmp_path}/labels.json is not a list of labels"):
        Vocabulary.load(tmp_path)


def test_the_tokenizer_of_another_run(tmp_path):
    bpe = ALL["bpe(vocab_size=300)"]
    Vocabulary(bpe).save(tmp_path)
    again = train(f"saved(path={str(tmp_path)!r})")
    assert again.fingerprint == bpe.fingerprint
    with pytest.raises(SpecError, match="there is no tokenizer at .*/nowhere/tokenizer.json"):
        train(f"saved(path={str(tmp_path / 'nowhere')!r})")
