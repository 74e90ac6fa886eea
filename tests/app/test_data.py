"""Text for training: what is read, what is held out, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pipecomm.app.data import Corpus, load_corpus, standard_library
from pipecomm.errors import ConfigError

LENGTH = 8


def text_file(path: Path, nbytes: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(32 + k % 90 for k in range(nbytes)))
    return path


def refusal(path: Path, length: int = LENGTH) -> str:
    with pytest.raises(ConfigError) as caught:
        load_corpus(path, length)
    return str(caught.value)


def test_corpus_without_a_path_is_the_standard_library() -> None:
    corpus = load_corpus(None, 128)
    assert (standard_library() / "argparse.py").is_file()
    assert len(corpus.train) > 1_000_000
    assert corpus.description.startswith("standard library sources")


def test_corpus_of_a_file_holds_out_the_last_tenth(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.txt")
    corpus = load_corpus(path, LENGTH)
    assert len(corpus.held_out) == 100
    assert bytes(corpus.train.tolist() + corpus.held_out.tolist()) == path.read_bytes()


def test_corpus_of_a_folder_has_every_text_below_it_once(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.py", "sub/deep/c"):
        text_file(tmp_path / name, 500)
    (tmp_path / "binary").write_bytes(b"\0" * 900)
    text_file(tmp_path / ".hidden", 900)
    text_file(tmp_path / ".git/config", 900)
    corpus = load_corpus(tmp_path, LENGTH)
    assert len(corpus.train) + len(corpus.held_out) == 1500
    assert "1500" not in corpus.description
    assert str(tmp_path) in corpus.description


def test_corpus_order_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    for root, names in (("one", "abcdef"), ("two", "fedcba")):
        for name in names:
            path = tmp_path / root / name
            text_file(path)
            path.write_bytes(name.encode() * 100)
    one, two = (load_corpus(tmp_path / root, LENGTH) for root in ("one", "two"))
    assert one.fingerprint == two.fingerprint


def test_fingerprint_tells_texts_apart(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a")
    before = load_corpus(path, LENGTH).fingerprint
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert load_corpus(path, LENGTH).fingerprint != before


def test_batch_has_inputs_and_the_bytes_that_follow() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    corpus = Corpus(train=text[:150], held_out=text[150:], description="")
    for inputs, targets in (corpus.batch(3, 5, LENGTH, 0), corpus.held_out_batch(3, 5, LENGTH)):
        assert inputs.shape == targets.shape == (5, LENGTH)
        assert inputs.dtype == torch.int64
        assert torch.equal(inputs + 1, targets)


def test_batch_comes_from_its_own_part_and_reaches_both_ends() -> None:
    text = torch.arange(30, dtype=torch.uint8)
    corpus = Corpus(train=text[:20], held_out=text[20:], description="")
    _, targets = corpus.batch(0, 500, LENGTH, 0)
    inputs, _ = corpus.batch(0, 500, LENGTH, 0)
    assert (int(inputs.min()), int(targets.max())) == (0, 19)
    inputs, targets = corpus.held_out_batch(0, 500, LENGTH)
    assert (int(inputs.min()), int(targets.max())) == (20, 29)


def test_batch_is_the_same_for_the_same_arguments_only() -> None:
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    corpus = Corpus(train=text[:9000], held_out=text[9000:], description="")
    first = corpus.batch(1, 4, LENGTH, 7)[0]
    assert torch.equal(first, corpus.batch(1, 4, LENGTH, 7)[0])
    assert not torch.equal(first, corpus.batch(2, 4, LENGTH, 7)[0])
    assert not torch.equal(first, corpus.batch(1, 4, LENGTH, 8)[0])
    assert not torch.equal(
        corpus.held_out_batch(0, 4, LENGTH)[0], corpus.held_out_batch(1, 4, LENGTH)[0]
    )


def test_missing_path_is_refused_with_the_path(tmp_path: Path) -> None:
    text = refusal(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in text
    assert "No such file" in text
    assert "--data" in text


def test_empty_file_is_refused(tmp_path: Path) -> None:
    path = text_file(tmp_path / "empty", 0)
    text = refusal(path)
    assert "no byte" in text
    assert str(path) in text


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "got none" in refusal(tmp_path)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"\x89PNG\0" * 500)
    assert "binary" in refusal(path)


def test_text_too_short_for_a_sequence_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = text_file(tmp_path / "short", 80)
    text = refusal(path)
    assert "91 bytes" in text
    assert "80 bytes" in text
    text_file(path, 91)
    assert len(load_corpus(path, LENGTH).held_out) == LENGTH + 1


def test_pipe_is_refused_without_being_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "something else" in refusal(tmp_path / "pipe")


def test_pipe_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text_file(tmp_path / "text")
    assert len(load_corpus(tmp_path, LENGTH).train) == 900


def test_unreadable_file_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path = text_file(tmp_path / "a")
    # The tests may run as root, which may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    assert f"{path}: cannot be read: Permission denied" in refusal(tmp_path)


def test_large_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipecomm.app.data._MAX_NBYTES", 1500)
    for name in "abc":
        text_file(tmp_path / name)
    corpus = load_corpus(tmp_path, LENGTH)
    assert len(corpus.train) + len(corpus.held_out) == 1500
