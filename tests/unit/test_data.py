"""Corpus and batches: what is read, what is held out, and that batches depend on the global index alone."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from moe_ep.errors import RecipeError
from recipes.corpus import EXCLUDED, CorpusError, _walk, load_corpus, unigram_entropy
from recipes.data import END_OF_DOCUMENT, IGNORE, VOCAB_SIZE, TrainData, ValidData, decode, encode


def write(root: Path, **files: bytes) -> str:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(root)


def numbered(count: int) -> dict[str, bytes]:
    return {f"f{i}.txt": b"%d " % i * 50 for i in range(count)}


def test_default_corpus_is_the_standard_library_split_by_file() -> None:
    corpus = load_corpus(None, 0.01)
    info = corpus.info
    assert info.source == "Python standard library" and info.python
    assert info.train_bytes + info.valid_bytes > 5_000_000
    assert 0.008 < info.valid_bytes / (info.train_bytes + info.valid_bytes) <= 0.01
    assert not set(corpus.train) & set(corpus.valid)
    assert len(set(corpus.train)) == info.train_files == len(corpus.train)
    assert 2.5 < info.valid_unigram_entropy < 4 and 0.8 < info.valid_gzip < 2
    assert load_corpus(None, 0.01).info == info


def test_default_corpus_leaves_out_packages_and_test_folders(tmp_path: Path) -> None:
    kept = {"a.py": b"a", "json__b.py": b"b"}
    write(tmp_path, **kept, **{f"{folder}/c.py": b"c" for folder in EXCLUDED}, **{"d.txt": b"d", ".e.py": b"e"})
    assert sorted(_walk(tmp_path, default=True)) == ["a.py", "json/b.py"]


def test_no_content_counts_twice_and_binary_files_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, a=b"same", sub__b=b"same", c=b"other", d=b"zero \0 byte", e=b"")
    info = load_corpus(path, 0.5).info
    assert (info.train_files + info.valid_files, info.duplicate_files, info.binary_files) == (2, 1, 1)
    assert info.train_bytes + info.valid_bytes == 9


def test_order_and_digest_do_not_depend_on_the_order_of_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, **numbered(9), sub__g=b"text")
    straight = load_corpus(path, 0.3)
    walk = os.walk

    def backwards(root: Path) -> object:
        return ((folder, subfolders, files[::-1]) for folder, subfolders, files in walk(root))

    monkeypatch.setattr(os, "walk", backwards)
    assert load_corpus(path, 0.3) == straight


@pytest.mark.parametrize("change", ["content", "name"])
def test_digest_sees_content_and_name(tmp_path: Path, change: str) -> None:
    path = write(tmp_path, **numbered(4))
    before = load_corpus(path, 0.1).info.sha256
    if change == "content":
        (tmp_path / "f1.txt").write_bytes(b"1 " * 49 + b"2 ")
    else:
        (tmp_path / "f1.txt").rename(tmp_path / "g1.txt")
    assert load_corpus(path, 0.1).info.sha256 != before


def test_adding_a_file_moves_few_others(tmp_path: Path) -> None:
    path = write(tmp_path, **numbered(100))
    held = set(load_corpus(path, 0.2).valid)
    write(tmp_path, new=b"new " * 10)
    after = set(load_corpus(path, 0.2).valid)
    assert len(held) > 10 and len(held - after) <= 2


def test_one_large_file_is_held_out_only_when_nothing_else_fits(tmp_path: Path) -> None:
    path = write(tmp_path, big=b"b" * 900, small=b"s" * 100)
    assert load_corpus(path, 0.01).valid == [b"s" * 100]


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, text=b"0123456789")
    corpus = load_corpus(path + "/text", 0.2)
    assert (corpus.train, corpus.valid) == ([b"01234567"], [b"89"])


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "nowhere", "does not exist"),
        ({}, ".", "holds no text"),
        ({"a": b"", "b": b"\0"}, ".", "holds no text"),
        ({"a": b"text"}, ".", "name the file itself"),
        ({"a": b"t"}, "a", "leaves none"),
    ],
)
def test_missing_and_empty_corpora_are_named(tmp_path: Path, files: dict, name: str, message: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(CorpusError, match=message):
        load_corpus(str(tmp_path / name), 0.1)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_valid_fraction_must_leave_both_sides(fraction: float) -> None:
    with pytest.raises(RecipeError, match="valid_fraction must lie inside"):
        load_corpus(None, fraction)


def test_unigram_entropy_of_known_frequencies() -> None:
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aab") == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


def test_encoding_separates_documents_and_keeps_all_bytes() -> None:
    documents = [b"ab", b"", bytes(range(256))]
    tokens = encode(documents).tolist()
    end = END_OF_DOCUMENT
    assert tokens == [end, 97, 98, end, end, *range(256), end]
    assert max(tokens) < VOCAB_SIZE
    assert decode(tokens) == b"".join(documents)


def global_batch(data: TrainData, step: int, world: int, accumulation: int) -> list[torch.Tensor]:
    """Pieces of a step in global order, as `world` ranks read them."""
    sizes = {"micro_batch_size": 2, "accumulation": accumulation, "world": world}
    return [data.piece(step, a, rank=r, **sizes).ids for a in range(accumulation) for r in range(world)]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_any_world_size_sees_the_same_pieces(world: int, accumulation: int) -> None:
    tokens = torch.arange(4000, dtype=torch.int16)
    for step in (0, 7, 61):
        expected = global_batch(TrainData(tokens, 16, seed=3), step, 1, 8)
        got = global_batch(TrainData(tokens, 16, seed=3), step, world, accumulation)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_sample_is_a_function_of_seed_and_index() -> None:
    tokens = torch.arange(4000, dtype=torch.int16)
    data = TrainData(tokens, 16, seed=3)
    forward = [data.sample(i) for i in range(600)]
    backward = [TrainData(tokens, 16, seed=3).sample(i) for i in reversed(range(600))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = TrainData(tokens, 16, seed=4)
    assert sum(torch.equal(a, other.sample(i)) for i, a in enumerate(forward)) < 30


def test_an_epoch_reads_each_window_once_and_epochs_differ() -> None:
    data = TrainData(torch.arange(4000, dtype=torch.int16), 16, seed=0)
    count = data.samples_per_epoch
    assert count == 249
    epochs = [[int(data.sample(e * count + i)[0]) for i in range(count)] for e in range(3)]
    for starts in epochs:
        assert sorted(starts) == list(range(min(starts), min(starts) + 16 * count, 16))
    assert len({min(starts) for starts in epochs}) > 1 and epochs[0] != epochs[1]


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 48, 49])
def test_every_sample_has_its_full_length_and_targets_are_the_next_tokens(length: int) -> None:
    data = TrainData(torch.arange(length, dtype=torch.int16), 16, seed=0)
    for index in range(40):
        window = data.sample(index)
        assert window.tolist() == list(range(int(window[0]), int(window[0]) + 17))
    batch = data.piece(0, 0, micro_batch_size=3, accumulation=1, rank=0, world=1)
    assert torch.equal(batch.targets, batch.ids + 1)
    assert batch.valid.all() and batch.num_tokens == batch.valid.sum() == 48


def test_a_text_shorter_than_a_sequence_is_named() -> None:
    with pytest.raises(CorpusError, match=r"has 16 tokens, one sequence needs sequence_length \+ 1 = 17"):
        TrainData(torch.arange(16, dtype=torch.int16), 16, seed=0)
    with pytest.raises(CorpusError, match="held-out text is empty"):
        ValidData(torch.arange(1, dtype=torch.int16), 16)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [2, 16, 17, 18, 100, 129])
def test_validation_predicts_each_token_once_with_equally_many_calls(world: int, length: int) -> None:
    data = ValidData(torch.arange(length, dtype=torch.int16), 16)
    per_rank = [list(data.batches(micro_batch_size=2, rank=r, world=world)) for r in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    batches = [b for batches in per_rank for b in batches]
    targets = torch.cat([b.targets[b.valid] for b in batches])
    assert sorted(targets.tolist()) == list(range(1, length))
    for batch in batches:
        assert batch.ids.shape == (2, 16) and batch.num_tokens == batch.valid.sum()
        assert (batch.targets[~batch.valid] == IGNORE).all() and (batch.ids[~batch.valid] == END_OF_DOCUMENT).all()
        assert torch.equal(batch.targets[batch.valid], batch.ids[batch.valid] + 1)
